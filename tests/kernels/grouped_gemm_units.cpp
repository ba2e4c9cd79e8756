// Checks the units of `megafp8/kernels/grouped_gemm_cuda.cu` on the CPU: each tile is computed once, by the two
// multiprocessors of a cluster as the unit says. Included before this: the source up to its producer.
//
// Input: lines of n, clusters, experts and the rows of each expert. Output: the units of each line and those of the
// cluster that has most; or what is wrong.

#include <cstdio>
#include <map>
#include <utility>
#include <vector>

static bool wrong(const char* what) {
    std::printf("wrong: %s\n", what);
    return false;
}

static bool neighbours(const Walk& left, const Walk& right) {
    if (left.idle || left.expert != right.expert || left.shared != right.shared) return false;
    if (left.shared == NEITHER) return right.idle;
    if (right.idle) return false;
    if (left.shared == OF_A) return left.row == right.row && left.column + WIDTH == right.column;
    return left.column == right.column && left.row + BLOCK == right.row;
}

static bool check(int n, int clusters, const std::vector<int>& rows_e) {
    std::vector<int> ends_e, starts_e, padded_e;
    int end = 0, padded = 0;
    long tiles = 0;
    for (int rows : rows_e) {
        starts_e.push_back(end);
        padded_e.push_back(padded);
        ends_e.push_back(end += rows);
        padded += (rows + 127) / 128 * 128;
        tiles += (rows + 127) / 128 * ((n + WIDTH - 1) / WIDTH);
    }
    std::map<std::pair<int, int>, int> computed;
    long units = 0, most = 0;
    for (int cluster = 0; cluster < clusters; ++cluster) {
        Walk left(ends_e.data(), (int)rows_e.size(), n, clusters, cluster, 0);
        Walk right(ends_e.data(), (int)rows_e.size(), n, clusters, cluster, 1);
        long own = 0;
        while (true) {
            const bool more = left.next();
            if (more != right.next()) return wrong("one multiprocessor has more units");
            if (!more) break;
            own += 1;
            if (!neighbours(left, right)) return wrong("not neighbours");
            for (const Walk* at : {&left, &right}) {
                if (at->idle) continue;
                const int below = at->row - starts_e[at->expert];
                if (below < 0 || below % BLOCK || at->row >= ends_e[at->expert]) return wrong("row");
                if (at->column % WIDTH || at->column >= n) return wrong("column");
                if (at->padded_row != padded_e[at->expert] + below) return wrong("row of scales");
                if (computed[{at->row, at->column}]++) return wrong("computed twice");
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
    int n, clusters, experts;
    while (std::scanf("%d %d %d", &n, &clusters, &experts) == 3) {
        std::vector<int> rows_e(experts);
        for (int& rows : rows_e) std::scanf("%d", &rows);
        if (!check(n, clusters, rows_e)) return 1;
    }
}
