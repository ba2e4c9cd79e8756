// Checks the units of `megafp8/kernels/grouped_sums_cuda.cu` on the CPU: each tile is computed once, by the two
// multiprocessors of a cluster as the unit says. Included before this: the source up to its producer.
//
// Input: lines of p, q, clusters, whether sums are added, experts, and the blocks of rows of each expert in an earlier
// micro-batch and in this one. Output: the units of each line and those of the cluster that has most; or what is wrong.

#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

static bool wrong(const char* what) {
    std::printf("wrong: %s\n", what);
    return false;
}

static bool neighbours(const Walk& left, const Walk& right) {
    if (left.idle || left.expert != right.expert || left.shared != right.shared) return false;
    if (left.parts != right.parts || left.parts != left.width / PART || left.blocks() != right.blocks()) return false;
    if (right.idle) return !left.shared;
    if (left.shared) return left.column == right.column && left.row + BLOCK == right.row;
    return left.row == right.row && left.column + WIDTH == right.column;
}

static bool check(const Sizes& sizes, int clusters, const std::vector<int>& earlier_e,
                  const std::vector<int>& blocks_e) {
    std::vector<int> ends_e, earlier_ends_e;
    int end = 0, earlier_end = 0;
    long tiles = 0;
    for (int expert = 0; expert < sizes.experts; ++expert) {
        ends_e.push_back(end += blocks_e[expert] * BLOCK);
        earlier_ends_e.push_back(earlier_end += earlier_e[expert] * BLOCK);
        if (!sizes.accumulate || blocks_e[expert] + earlier_e[expert])
            tiles += (sizes.p + BLOCK - 1) / BLOCK * ((sizes.q + WIDTH - 1) / WIDTH);
    }
    std::map<std::tuple<int, int, int>, int> computed;
    long units = 0, most = 0;
    for (int cluster = 0; cluster < clusters; ++cluster) {
        const int* earlier = earlier_end ? earlier_ends_e.data() : nullptr;
        Walk left(ends_e.data(), earlier, sizes, clusters, cluster, 0);
        Walk right(ends_e.data(), earlier, sizes, clusters, cluster, 1);
        long own = 0;
        while (true) {
            const bool more = left.next();
            if (more != right.next()) return wrong("one multiprocessor has more units");
            if (!more) break;
            own += 1;
            if (!neighbours(left, right)) return wrong("not neighbours");
            for (const Walk* at : {&left, &right}) {
                if (at->idle) continue;
                if (at->row < 0 || at->row % BLOCK || at->row >= sizes.p) return wrong("row");
                if (at->column < 0 || at->column % WIDTH || at->column >= sizes.q) return wrong("column");
                if (at->width <= 0 || at->width > WIDTH || at->column + at->width > sizes.q) return wrong("width");
                if (at->stop * BLOCK != ends_e[at->expert]) return wrong("end");
                if (at->stop - at->first != blocks_e[at->expert]) return wrong("blocks");
                if (at->earlier_stop - at->earlier_first != earlier_e[at->expert]) return wrong("earlier blocks");
                if (computed[{at->expert, at->row, at->column}]++) return wrong("computed twice");
            }
        }
        units += own;
        if (own > most) most = own;
    }
    if ((long)computed.size() != tiles) return wrong("tiles are left out");
    std::printf("%ld %ld\n", units, most);
    return true;
}

int main() {
    int clusters;
    Sizes sizes;
    while (std::scanf("%d %d %d %d %d", &sizes.p, &sizes.q, &clusters, &sizes.accumulate, &sizes.experts) == 5) {
        std::vector<int> earlier_e(sizes.experts), blocks_e(sizes.experts);
        for (std::vector<int>* x : {&earlier_e, &blocks_e})
            for (int& blocks : *x) std::scanf("%d", &blocks);
        if (!check(sizes, clusters, earlier_e, blocks_e)) return 1;
    }
}
