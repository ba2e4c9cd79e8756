// Products of rows with the matrix of their expert, with scales of blocks, for Hopper (sm_90a).
//
//     out[i, j] = sum over blocks of 128 summands of (a[i, block] · b[j, block]) · a_scale_inv · b_scale_inv
//
// a: FP8 rows `[m, k]` of all experts, one expert after the other, a scale for each block 1 × 128. b: FP8 matrices
// `[n, k]` of the experts, a scale for each block 128 × 128. Sums are fp32, results bf16 or fp16. n and k are
// multiples of 128. `megafp8/kernels/grouped_gemm_cuda.py` compiles and launches it, behind `hopper.cuh`. Macros:
// RESULT_TYPE, "bf16" or "f16"; and what a launch is made with (asserted below).
//
// The problem: Hopper's tensor cores add up FP8 products in 14 bits, so each block's product is scaled and added to
// fp32 sums by the threads. Registers hold both, which bounds a tile to 128 × 192, and a tile reads 40 KB for each
// block of summands.
//
// *Roles.* A program has a multiprocessor for itself and computes tile after tile:
//
//     producer    one warp: finds the next tile, copies operands and scales of rows to shared memory as far as there
//                 is room, and leaves a note about the tile beside its first block
//     consumers   two warpgroups, each with 64 of a tile's 128 rows: while one scales and adds, the tensor cores
//                 compute for the other
//
// *Clusters.* The two multiprocessors of a cluster compute two tiles at the same time, one above the other: each
// copies half of b's rows to both. A stage of shared memory is free when the consumers of both have read it.
//
// *Units* are such pairs of tiles (`Walk`). What is left over of an expert with an odd number of tiles in a column is
// cut into pairs of neighbours in a row, which share rows of a. Of an expert's last 64 rows or fewer, each consumer
// computes half of the columns. As tiles are 192 columns wide, the last is mostly narrower.

struct Sizes {
    int n, k, experts;
    int row_step, column_step;  // the matrix of expert i begins at row i · row_step and column i · column_step of b
    int a_stride, b_stride;     // from the scales of a block of summands of a to the next; of 128 rows of b
};

constexpr int BLOCK = 128;        // summands that share a scale, read at once; rows of a tile
constexpr int SIDE = 64;          // rows of a consumer
constexpr int WIDTH = 192;        // columns of a tile
constexpr int HALF = WIDTH / 2;   // columns that one multiprocessor copies for both; of a consumer of 64 rows or fewer
constexpr int STAGES = 4;         // blocks in shared memory
constexpr int GROUP = 8;          // units next to each other in a column, before the next column: for the L2 cache
constexpr int CLUSTER = 2;        // multiprocessors
constexpr int CONSUMER_WARPS = 8;
constexpr int THREADS = 384;      // three warpgroups, as registers are given to warpgroups; the producer is in the last

constexpr int A_BYTES = BLOCK * BLOCK, B_BYTES = WIDTH * BLOCK, SCALE_BYTES = BLOCK * 4;
constexpr int STORE_STRIDE = WIDTH * 2 + 16;  // an odd multiple of 16 bytes: 8 rows lie in different banks
constexpr int STORE_BYTES = 16 * STORE_STRIDE;  // results of a warp

// Offsets in shared memory. Operands begin at multiples of 1024, as their swizzle wants.
constexpr int B_AT = STAGES * A_BYTES;
constexpr int SCALES_AT = B_AT + STAGES * B_BYTES;
constexpr int STORE_AT = SCALES_AT + STAGES * SCALE_BYTES;
constexpr int NOTES_AT = STORE_AT + CONSUMER_WARPS * STORE_BYTES;
constexpr int FULL_AT = NOTES_AT + STAGES * 16;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
static_assert(EMPTY_AT + STAGES * 8 == LAUNCHED_SHARED_BYTES && CLUSTER == LAUNCHED_CLUSTER, "");
static_assert(THREADS == LAUNCHED_THREADS && SIDE == A_BOX_ROWS && HALF == B_BOX_ROWS, "");

// --- tiles -----------------------------------------------------------------------------------------------------------

enum Shared { NEITHER, OF_A, OF_B };  // operand that the tiles of a unit share

// The units of a cluster, expert by expert.
//
// Most units are whole: two tiles with all rows and columns. They are dealt to the clusters in turn. So are the small
// ones, but from the last cluster on: clusters with one whole unit fewer have one small unit more.
struct Walk {
    int clusters, experts, rank;
    const int* ends_e;
    int full_columns, across;                 // columns of tiles: of full width; all
    int expert, start, end, padded;           // the expert's rows; where they begin in the columnwise copy
    int down, paired, left;                   // rows of tiles: all; pairs of them; those left over, 0 to 2
    bool half;                                // the last has 64 rows or fewer
    int whole_first, whole_stop, whole_next;  // of the expert; the next of the cluster
    int small_first, small_stop, small_next;
    int row, column, padded_row;              // the tile
    bool idle;                                // no tile in this unit
    Shared shared;

    __device__ Walk(const int* ends_e, int experts, int n, int clusters, int cluster, int rank)
        : clusters(clusters), experts(experts), rank(rank), ends_e(ends_e), full_columns(n / WIDTH),
          across((n + WIDTH - 1) / WIDTH), expert(-1), start(0), end(0), padded(0), whole_stop(0),
          whole_next(cluster), small_stop(0), small_next(clusters - 1 - cluster) {}

    __device__ void next_expert() {
        padded += (end - start + BLOCK - 1) / BLOCK * BLOCK;
        start = end;
        end = ends_e[++expert];
        const int rows = end - start;
        down = (rows + BLOCK - 1) / BLOCK;
        half = rows > 0 && (rows - 1) % BLOCK < SIDE;
        paired = down / 2 - (half && down % 2 == 0);  // a half row of tiles has no whole one as its neighbour
        left = down - 2 * paired;
        whole_first = whole_stop;
        whole_stop += paired * full_columns + (left - half) * (across / 2);
        small_first = small_stop;
        small_stop += paired * (across - full_columns) + half * (across / 2) + (left > 0) * (across % 2);
    }

    __device__ void place_whole(int index) {
        if (index < paired * full_columns) {
            const int group = index / (GROUP * full_columns), within = index % (GROUP * full_columns);
            const int height = min(paired - group * GROUP, GROUP);
            place(2 * (group * GROUP + within % height) + rank, within / height, OF_B);
        } else {
            place(2 * paired, 2 * (index - paired * full_columns) + rank, OF_A);
        }
    }

    __device__ void place_small(int index) {
        const int narrow = paired * (across - full_columns);
        if (index < narrow) {
            place(2 * index + rank, full_columns, OF_B);
        } else if (index - narrow < half * (across / 2)) {
            place(down - 1, 2 * (index - narrow) + rank, OF_A);
        } else if (left == 2) {  // the last column of an odd number
            place(down - 2 + rank, across - 1, OF_B);
        } else {
            place(down - 1, across - 1, NEITHER);
            idle = rank > 0;
        }
    }

    __device__ void place(int i, int j, Shared of) {
        row = start + i * BLOCK;
        padded_row = padded + i * BLOCK;
        column = j * WIDTH;
        shared = of;
        idle = false;
    }

    // Goes to the next unit; false behind the last.
    __device__ bool next() {
        while (true) {
            if (whole_next < whole_stop) {
                place_whole(whole_next - whole_first);
                whole_next += clusters;
                return true;
            }
            if (small_next < small_stop) {
                place_small(small_next - small_first);
                small_next += clusters;
                return true;
            }
            if (expert + 1 == experts) return false;
            next_expert();
        }
    }
};

// --- producer --------------------------------------------------------------------------------------------------------

using Ring = RingOf<STAGES>;

__device__ __forceinline__ void copy_tiles(const TensorMap* a, const TensorMap* b, const float* a_scale_inv,
                                           const int* ends_e, const Sizes& sizes, u32 memory) {
    const u32 rank = cluster_rank();
    const int blocks = sizes.k / BLOCK;
    Walk at(ends_e, sizes.experts, sizes.n, gridDim.x / CLUSTER, blockIdx.x / CLUSTER, rank);
    Ring ring = {0, 1};  // the first round of stages is free
    while (at.next()) {
        // Tiles of 64 rows or fewer, or of 64 columns, need no second half of an operand.
        const bool second_a = at.row + SIDE < at.end, second_b = at.column + HALF < sizes.n;
        const u32 operands = (second_a ? A_BYTES : A_BYTES / 2) + (second_b ? B_BYTES : B_BYTES / 2);
        const u32 bytes = at.idle ? 0 : operands + SCALE_BYTES;
        const int b_row = at.expert * sizes.row_step + at.column;
        int b_column = at.expert * sizes.column_step;
        const float* scales = a_scale_inv + at.padded_row;
        const int b_scale = b_row / BLOCK * sizes.b_stride + b_column / BLOCK;
        for (int i = 0; i < blocks; ++i) {
            const u32 full = memory + FULL_AT + ring.stage * 8;
            wait(memory + EMPTY_AT + ring.stage * 8, ring.parity);
            if (elected()) {
                if (i == 0)
                    store_note(memory + NOTES_AT + ring.stage * 16, at.idle ? at.end : at.row, at.end, at.column,
                               b_scale);
                arrive_and_expect(full, bytes);
            }
            if (!at.idle && elected()) {
                const u32 a_to = memory + ring.stage * A_BYTES, b_to = memory + B_AT + ring.stage * B_BYTES;
                if (at.shared == OF_A) {
                    if (rank == 0 || second_a)
                        copy_box_to_both(a, a_to + rank * (A_BYTES / 2), i * BLOCK, at.row + rank * SIDE, full);
                } else {
                    copy_box(a, a_to, i * BLOCK, at.row, full);
                    if (second_a) copy_box(a, a_to + A_BYTES / 2, i * BLOCK, at.row + SIDE, full);
                }
                if (at.shared == OF_B) {
                    if (rank == 0 || second_b)
                        copy_box_to_both(b, b_to + rank * (B_BYTES / 2), b_column, b_row + rank * HALF, full);
                } else {
                    copy_box(b, b_to, b_column, b_row, full);
                    if (second_b) copy_box(b, b_to + B_BYTES / 2, b_column, b_row + HALF, full);
                }
                copy_scales(memory + SCALES_AT + ring.stage * SCALE_BYTES, scales, SCALE_BYTES, full);
            }
            b_column += BLOCK;
            scales += sizes.a_stride;
            ring.next();
        }
    }
    wait(memory + EMPTY_AT + ring.stage * 8, ring.parity);
    if (elected()) {
        store_note(memory + NOTES_AT + ring.stage * 16, -1, 0, 0, 0);  // no more tiles
        arrive(memory + FULL_AT + ring.stage * 8);
    }
}

// --- consumers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 two_results(float low, float high) {
    u32 x;
    asm("cvt.rn." RESULT_TYPE "x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

// Fragments of 16 rows and 16 columns of results to the rows of shared memory whose addresses the lanes have.
__device__ __forceinline__ void store_matrices(u32 to, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z),
                 "r"(w) : "memory");
}

struct Consumer {
    u32 memory;
    int lane, part;  // part: the warp's place for results in shared memory
    Ring ring;

    __device__ __forceinline__ void wait_full() { wait(memory + FULL_AT + ring.stage * 8, ring.parity); }

    // The warp has read its part of the stage.
    __device__ __forceinline__ void release() {
        if (lane < CLUSTER) arrive_at(memory + EMPTY_AT + ring.stage * 8, lane);
    }

    __device__ __forceinline__ float scale_of(int row) {
        return load_float(memory + SCALES_AT + ring.stage * SCALE_BYTES + row * 4);
    }

    // sums += product · scales of one block. a, b: the consumer's operands in the first stage. A thread has sums of two
    // rows, `row` and 8 below. The first `former` columns have the scale of b at `b_scale`, others that of the next 128
    // rows of b, `second` further.
    template <int COLUMNS>
    __device__ __forceinline__ void add_block(float (&sums)[COLUMNS / 2], u32 a, u32 b, int row, const float* b_scale,
                                              int second, int former) {
        float product[COLUMNS / 2];
        const float left = load_scale(b_scale), right = former < COLUMNS ? load_scale(b_scale + second) : left;
        wait_full();
        const float low = scale_of(row), high = scale_of(row + 8);
        begin_product(product, operand(a + ring.stage * (A_BYTES / 16)), operand(b + ring.stage * (B_BYTES / 16)));
        wait_product();
        computed(product);
        release();
        ring.next();
        const float low_left = __fmul_rn(low, left), high_left = __fmul_rn(high, left);
        const float low_right = __fmul_rn(low, right), high_right = __fmul_rn(high, right);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i += 4) {
            const bool is_left = i * 2 / 32 * 32 < former;  // all of 32 columns are
            const float x = is_left ? low_left : low_right, y = is_left ? high_left : high_right;
            sums[i] = __fmaf_rn(product[i], x, sums[i]);
            sums[i + 1] = __fmaf_rn(product[i + 1], x, sums[i + 1]);
            sums[i + 2] = __fmaf_rn(product[i + 2], y, sums[i + 2]);
            sums[i + 3] = __fmaf_rn(product[i + 3], y, sums[i + 3]);
        }
    }

    // A warp's 16 rows of results, of which `rows` and `columns` are inside, `n` apart. The copy engine stores them, so
    // that the warp goes on.
    template <int COLUMNS>
    __device__ __forceinline__ void store(const float (&sums)[COLUMNS / 2], unsigned short* out, int n, int rows,
                                          int columns) {
        wait_stores_read();
        __syncwarp();
        const u32 to = part + lane % 16 * STORE_STRIDE + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i += 8)
            store_matrices(to + i * 4, two_results(sums[i], sums[i + 1]), two_results(sums[i + 2], sums[i + 3]),
                           two_results(sums[i + 4], sums[i + 5]), two_results(sums[i + 6], sums[i + 7]));
        fence_written();
        __syncwarp();
        if (elected()) {
#pragma unroll 1
            for (int i = 0; i < rows; ++i) begin_store(out + (long long)i * n, part + i * STORE_STRIDE, columns * 2);
            commit_stores();
        }
        // Otherwise the compiler takes what follows for divergent, and keeps operands' addresses for each thread.
        __syncwarp();
    }

    template <int COLUMNS>
    __device__ __forceinline__ void tile(u32 a, u32 b, int row, const float* b_scales, int second, int former,
                                         int blocks, unsigned short* out, int n, int rows, int columns) {
        float sums[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.f;
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) add_block<COLUMNS>(sums, a, b, row, b_scales + i, second, former);
        if (rows > 0 && columns > 0) store<COLUMNS>(sums, out, n, min(rows, 16), min(columns, COLUMNS));
    }

    // Without a tile.
    __device__ __forceinline__ void skip(int blocks) {
        for (int i = 0; i < blocks; ++i) {
            wait_full();
            __syncwarp();  // all lanes have seen it full
            release();
            ring.next();
        }
    }
};

__device__ __forceinline__ void multiply_tiles(unsigned short* out, const float* b_scale_inv, const Sizes& sizes,
                                               u32 memory) {
    const int warp = same(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int index = warp / 4, n = sizes.n, blocks = sizes.k / BLOCK;
    Consumer self = {memory, lane, (int)memory + STORE_AT + warp * STORE_BYTES, {0, 0}};
    // kept in registers of the warp: otherwise computed anew for each block
    const u32 a = same(operand_at(memory));
    const u32 b = same(operand_at(memory + B_AT));
    const u32 own_a = a + index * (A_BYTES / 2 / 16), own_b = b + index * (B_BYTES / 2 / 16);
    while (true) {
        self.wait_full();
        const int4 note = load_note(memory + NOTES_AT + self.ring.stage * 16);
        const int first = same(note.x), rows = same(note.y) - first, column = same(note.z), columns = n - column;
        if (first < 0) break;
        const float* b_scales = b_scale_inv + note.w;
        const int second = column / BLOCK + 1 < n / BLOCK ? sizes.b_stride : 0;
        unsigned short* to = out + (long long)first * n + column;
        if (rows <= 0) {
            self.skip(blocks);
        } else if (rows <= SIDE) {  // all rows, half of the columns
            const int below = warp % 4 * 16;
            self.tile<HALF>(a, own_b, below + lane / 4, b_scales, second, BLOCK - column % BLOCK - index * HALF, blocks,
                            to + (long long)below * n + index * HALF, n, rows - below, columns - index * HALF);
        } else {
            const int below = warp * 16, row = below + lane / 4;
            to += (long long)below * n;
            if (columns == 64)
                self.tile<64>(own_a, b, row, b_scales, 0, 64, blocks, to, n, rows - below, columns);
            else if (columns == 128)
                self.tile<128>(own_a, b, row, b_scales, 0, 128, blocks, to, n, rows - below, columns);
            else if (column % BLOCK == 0)
                self.tile<WIDTH>(own_a, b, row, b_scales, second, 128, blocks, to, n, rows - below, columns);
            else
                self.tile<WIDTH>(own_a, b, row, b_scales, second, 64, blocks, to, n, rows - below, columns);
        }
    }
    wait_stores_read();  // shared memory is there as long
}

// --- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    rows_kernel(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const float* a_scale_inv,
                unsigned short* out, const float* b_scale_inv, const int* ends_e, const __grid_constant__ Sizes sizes) {
    const u32 memory = shared_address(shared_memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(memory + FULL_AT + stage * 8, 1);
            barrier_init(memory + EMPTY_AT + stage * 8, CLUSTER * CONSUMER_WARPS);
        }
        fence_barriers();
    }
    cluster_sync();
    if (threadIdx.x >= CONSUMER_WARPS * 32) {
        few_registers();
        if (same(threadIdx.x / 32) == CONSUMER_WARPS)
            copy_tiles(&a, &b, a_scale_inv, ends_e, sizes, memory);
    } else {
        many_registers();
        multiply_tiles(out, b_scale_inv, sizes, memory);
    }
    cluster_sync();  // the peer's copies and arrivals are over
}
