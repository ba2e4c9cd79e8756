// Products of rows with the matrix of their expert, for Hopper (sm_90a).
//
//     out[i, j] = sum over blocks of 128 summands of (a[i, block] · b[j, block]) · a_scale_inv · b_scale_inv
//
// a contains the FP8 rows `[m, k]` of all experts, one expert after the other. b contains the experts' FP8 matrices
// `[n, k]`. Sums are fp32, and results are bf16 or fp16. `megafp8/kernels/grouped_gemm_cuda.py` compiles and launches
// this file, after `hopper.cuh`. Macros contain the parameters of a launch (asserted below).
//
// With BLOCK_SCALES, a has a scale for each block of 1 × 128 and b for each block of 128 × 128, and n and k are
// multiples of 128. Otherwise, each expert has one scale for its rows and one for its matrix, which multiply the sums.
// n and k are then multiples of 16: tiles may reach beyond n, where nothing is stored, and blocks beyond k, where the
// copy engine reads zeros from a.
//
// The problem: Hopper's tensor cores add FP8 products in 14 bits, so threads must add each block's product to fp32 sums
// unless FAST_SUMS is set. Registers hold both, which limits a tile to 128 × 192, and a tile reads 40 KB for each block
// of summands. Fast sums have the same tiles, because a tile's results are stored during the next tile's first block.
//
// *Roles.* A program has a multiprocessor for itself and computes one tile after another:
//
//     producer    one warp: finds the next tile, copies operands and scales of rows to shared memory while there is
//                 room, and leaves a note about the tile next to its first block
//     consumers   two warpgroups, each with 64 of a tile's 128 rows: while one scales or adds, the tensor cores
//                 compute for the other; each stores a tile's results while the tensor cores compute the first block
//                 of its next tile
//
// *Clusters.* The two multiprocessors of a cluster compute two tiles at the same time, one above the other. Each copies
// half of b's rows to both. A stage of shared memory is free when the consumers of both have read it.
//
// *Units* are such pairs of tiles (`Walk`). If an expert has an odd number of tiles in a column, its last row of tiles
// is divided into pairs of neighbors, which share rows of a. At most one tile has no neighbor; while it is computed,
// the other multiprocessor is idle.

struct Sizes {
    int n, k, experts;
    int row_step, column_step;  // the matrix of expert i begins at row i · row_step and column i · column_step of b
    int a_stride, b_stride;     // strides of scales: along blocks of summands of a and of 128 rows of b, or of experts
};

constexpr int BLOCK = 128;        // summands that share a scale, read at once; rows of a tile
constexpr int SIDE = 64;          // rows of a consumer
constexpr int WIDTH = 192;        // columns of a tile
constexpr int HALF = WIDTH / 2;   // columns that one multiprocessor copies for both
constexpr int SUMS = WIDTH / 2;   // sums of a thread
constexpr int STAGES = 5;         // blocks in shared memory
constexpr int STORE = 64;         // columns of results that pass through shared memory at once
constexpr int GROUP = 8;          // units computed down a column before the next column, for the L2 cache
constexpr int CLUSTER = 2;        // multiprocessors in a cluster
constexpr int CONSUMER_WARPS = 8;
constexpr int THREADS = 384;      // three warpgroups, because registers are assigned per warpgroup; the last produces

constexpr int A_BYTES = BLOCK * BLOCK, B_BYTES = WIDTH * BLOCK, SCALE_BYTES = BLOCK_SCALES ? BLOCK * 4 : 0;
constexpr int STORE_STRIDE = STORE * 2 + 16;    // an odd multiple of 16 bytes, so that 8 rows are in different banks
constexpr int STORE_BYTES = 16 * STORE_STRIDE;  // bytes of a warp

// Offsets in shared memory. Operands begin at multiples of 1024, as swizzling requires.
constexpr int B_AT = STAGES * A_BYTES;
constexpr int SCALES_AT = B_AT + STAGES * B_BYTES;
constexpr int STORE_AT = SCALES_AT + STAGES * SCALE_BYTES;
constexpr int NOTES_AT = STORE_AT + CONSUMER_WARPS * STORE_BYTES;
constexpr int FULL_AT = NOTES_AT + STAGES * 16;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
static_assert(EMPTY_AT + STAGES * 8 <= LAUNCHED_SHARED_BYTES && CLUSTER == LAUNCHED_CLUSTER, "");
static_assert(!BLOCK_SCALES || !FAST_SUMS, "");
static_assert(THREADS == LAUNCHED_THREADS && SIDE == A_BOX_ROWS && HALF == B_BOX_ROWS, "");

// --- tiles -----------------------------------------------------------------------------------------------------------

enum Shared { NEITHER, OF_A, OF_B };  // operand that the tiles of a unit share

// Iterates over the units of a cluster. The units of all experts, in order, are assigned to the clusters in turn.
struct Walk {
    int clusters, experts, rank, across;  // across: number of tile columns
    const int* ends_e;
    int expert, start, end, padded;       // the expert's rows, and their beginning in the columnwise copy
    int down;                             // the expert's number of tile rows
    int first, stop, unit;                // the expert's units, and the cluster's next unit
    int row, column, padded_row;          // the tile
    bool idle;                            // whether this multiprocessor has no tile in the unit
    Shared shared;

    __device__ Walk(const int* ends_e, int experts, int n, int clusters, int cluster, int rank)
        : clusters(clusters), experts(experts), rank(rank), across((n + WIDTH - 1) / WIDTH), ends_e(ends_e),
          expert(-1), start(0), end(0), padded(0), stop(0), unit(cluster) {}

    __device__ void next_expert() {
        padded += (end - start + BLOCK - 1) / BLOCK * BLOCK;
        start = end;
        end = ends_e[++expert];
        down = (end - start + BLOCK - 1) / BLOCK;
        first = stop;
        stop += down / 2 * across + down % 2 * ((across + 1) / 2);
    }

    // Goes to the next unit; returns false after the last unit.
    __device__ bool next() {
        while (unit >= stop) {
            if (expert + 1 == experts) return false;
            next_expert();
        }
        const int index = unit - first, pairs = down / 2 * across;
        int i, j;
        if (index < pairs) {
            const int group = index / (GROUP * across), within = index % (GROUP * across);
            const int height = min(down / 2 - group * GROUP, GROUP);
            i = 2 * (group * GROUP + within % height) + rank;
            j = within / height;
            shared = OF_B;
        } else {
            i = down - 1;
            j = 2 * (index - pairs);
            shared = j + 1 < across ? OF_A : NEITHER;
            j += rank;
        }
        idle = j >= across;
        row = start + i * BLOCK;
        padded_row = padded + i * BLOCK;
        column = j * WIDTH;
        unit += clusters;
        return true;
    }
};

// --- producer --------------------------------------------------------------------------------------------------------

using Ring = RingOf<STAGES>;

__device__ __forceinline__ void copy_tiles(const TensorMap* a, const TensorMap* b, const float* a_scale_inv,
                                           const int* ends_e, const Sizes& sizes, u32 memory) {
    const u32 rank = cluster_rank();
    const int blocks = (sizes.k + BLOCK - 1) / BLOCK;
    Walk at(ends_e, sizes.experts, sizes.n, gridDim.x / CLUSTER, blockIdx.x / CLUSTER, rank);
    Ring ring = {0, 1};  // the first round of stages is free
    while (at.next()) {
        const bool second_a = at.row + SIDE < at.end;  // otherwise the second consumer has no rows
        const u32 bytes = at.idle ? 0 : (second_a ? A_BYTES : A_BYTES / 2) + B_BYTES + SCALE_BYTES;
        const int b_row = at.expert * sizes.row_step + at.column;
        int b_column = at.expert * sizes.column_step;
        const float* scales = a_scale_inv + at.padded_row;
        const int scale = BLOCK_SCALES ? b_row / BLOCK * sizes.b_stride + b_column / BLOCK : at.expert;
        for (int i = 0; i < blocks; ++i) {
            const u32 full = memory + FULL_AT + ring.stage * 8;
            wait(memory + EMPTY_AT + ring.stage * 8, ring.parity);
            if (elected()) {
                if (i == 0)
                    store_note(memory + NOTES_AT + ring.stage * 16, at.idle ? at.end : at.row, at.end, at.column,
                               scale);
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
                    copy_box_to_both(b, b_to + rank * (B_BYTES / 2), b_column, b_row + rank * HALF, full);
                } else {
                    copy_box(b, b_to, b_column, b_row, full);
                    copy_box(b, b_to + B_BYTES / 2, b_column, b_row + HALF, full);
                }
                if (BLOCK_SCALES)
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

__device__ __forceinline__ void clear(float (&sums)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
}

struct Consumer {
    u32 memory;
    int warp, lane;
    u32 a, b, scales;  // addresses in the first stage: operands, and the thread's scale of a
    Ring ring;
    // The warp's first result of the previous tile, which is not stored yet; `rows` of its 16 rows, with the stride
    // `n`, and `columns` columns are inside the matrix.
    unsigned short* out;
    int n, rows, columns;
    float a_scale, b_scale;  // the previous tile's, if each expert has one scale

    __device__ __forceinline__ void wait_full() { wait(memory + FULL_AT + ring.stage * 8, ring.parity); }

    // Signals that the warp has read its part of a stage.
    __device__ __forceinline__ void release(u32 stage) {
        if (lane < CLUSTER) arrive_at(memory + EMPTY_AT + stage * 8, lane);
    }

    __device__ __forceinline__ u64 stage_of_a() { return operand(a + ring.stage * (A_BYTES / 16)); }
    __device__ __forceinline__ u64 stage_of_b() { return operand(b + ring.stage * (B_BYTES / 16)); }

    // Adds product · scales of one block to the sums. A thread has sums of two rows, the second 8 below the first. The
    // first FORMER columns use the scale of b at `b_scale`. The others use the scale of the next 128 rows of b, which
    // is `second` further. At a tile's FIRST block, the sums still belong to the previous tile.
    template <int FORMER, bool FIRST>
    __device__ __forceinline__ void add_block(float (&sums)[SUMS], const float* b_scale, int second) {
        float product[SUMS];
        const float left = load_scale(b_scale), right = load_scale(b_scale + second);
        wait_full();
        const u32 a_scale = scales + ring.stage * SCALE_BYTES;
        const float low = load_float(a_scale), high = load_float(a_scale + 8 * 4);
        begin_product(product, stage_of_a(), stage_of_b());
        if (FIRST) store(sums);
        wait_product();
        computed(product);
        release(ring.stage);
        ring.next();
        const float low_left = __fmul_rn(low, left), high_left = __fmul_rn(high, left);
        const float low_right = __fmul_rn(low, right), high_right = __fmul_rn(high, right);
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float x = i * 2 < FORMER ? low_left : low_right, y = i * 2 < FORMER ? high_left : high_right;
            sums[i] = __fmaf_rn(product[i], x, sums[i]);
            sums[i + 1] = __fmaf_rn(product[i + 1], x, sums[i + 1]);
            sums[i + 2] = __fmaf_rn(product[i + 2], y, sums[i + 2]);
            sums[i + 3] = __fmaf_rn(product[i + 3], y, sums[i + 3]);
        }
    }

    template <int FORMER>
    __device__ __forceinline__ void multiply(float (&sums)[SUMS], const float* b_scales, int second, int blocks) {
        add_block<FORMER, true>(sums, b_scales, second);
#pragma unroll 1
        for (int i = 1; i < blocks; ++i) add_block<FORMER, false>(sums, b_scales + i, second);
    }

    // Adds the product of one block to the sums.
    template <bool FIRST>
    __device__ __forceinline__ void add_block(float (&sums)[SUMS]) {
        float product[SUMS];
        wait_full();
        begin_product(product, stage_of_a(), stage_of_b());
        if (FIRST) store(sums);
        wait_product();
        computed(product);
        release(ring.stage);
        ring.next();
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = __fadd_rn(product[i], sums[i]);
    }

    __device__ __forceinline__ void multiply(float (&sums)[SUMS], int blocks) {
        add_block<true>(sums);
#pragma unroll 1
        for (int i = 1; i < blocks; ++i) add_block<false>(sums);
    }

    // Keeps the sums in the tensor cores. A product is started before the one before it ends.
    __device__ __forceinline__ void multiply_fast(float (&sums)[SUMS], int blocks) {
        float product[SUMS];
        wait_full();
        begin_product(product, stage_of_a(), stage_of_b());
        store(sums);
#pragma unroll 1
        for (int i = 1; i < blocks; ++i) {
            const u32 previous = ring.stage;
            ring.next();
            wait_full();
            add_product(product, stage_of_a(), stage_of_b());
            wait_product<1>();
            release(previous);
        }
        wait_product();
        computed(product);
        release(ring.stage);
        ring.next();
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = product[i];
    }

    // Stores the previous tile's sums and sets them to zero. They pass through the warp's part of shared memory, so
    // that 16 bytes of a row are stored at once. Nothing is stored if there was no tile.
    __device__ __forceinline__ void store(float (&sums)[SUMS]) {
        if (!BLOCK_SCALES) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] = __fmul_rn(__fmul_rn(sums[i], a_scale), b_scale);
        }
        const u32 part = memory + STORE_AT + warp * STORE_BYTES;
        const u32 to = part + lane % 16 * STORE_STRIDE + lane / 16 * 16;
        constexpr int CHUNKS = STORE / 8;  // chunks of 16 bytes per row
#pragma unroll
        for (int from = 0; from < WIDTH; from += STORE) {
#pragma unroll
            for (int j = 0; j < STORE; j += 16) store_results(to + j * 2, &sums[(from + j) / 2]);
            __syncwarp();
#pragma unroll
            for (int chunk = lane; chunk < 16 * CHUNKS; chunk += 32) {
                const int i = chunk / CHUNKS, j = chunk % CHUNKS * 8;
                const int4 results = load_16_bytes(part + i * STORE_STRIDE + j * 2);
                if (i < rows && from + j < columns) *(int4*)(out + (long long)i * n + from + j) = results;
            }
            __syncwarp();
        }
        clear(sums);
    }

    // Runs a consumer that has no rows in the tile.
    __device__ __forceinline__ void skip(int blocks) {
        for (int i = 0; i < blocks; ++i) {
            wait_full();
            __syncwarp();  // wait until all lanes have seen the stage full
            release(ring.stage);
            ring.next();
        }
    }
};

__device__ __forceinline__ void multiply_tiles(unsigned short* out, const float* a_scale_inv, const float* b_scale_inv,
                                               const Sizes& sizes, u32 memory) {
    const int warp = same(threadIdx.x / 32), lane = threadIdx.x % 32, index = warp / 4;
    const int n = sizes.n, blocks = (sizes.k + BLOCK - 1) / BLOCK;
    // kept in registers of the warp, because the compiler would compute them again for each block
    const u32 a = same(operand_at(memory + index * (A_BYTES / 2))), b = same(operand_at(memory + B_AT));
    const u32 scales = memory + SCALES_AT + (warp * 16 + lane / 4) * 4;
    Consumer self = {memory, warp, lane, a, b, scales, {0, 0}, out, n, 0, 0, 0.f, 0.f};
    float sums[SUMS];
    clear(sums);
    while (true) {
        self.wait_full();
        const int4 note = load_16_bytes(memory + NOTES_AT + self.ring.stage * 16);
        const int first = note.x, rows = note.y - first, column = note.z;
        if (first < 0) break;
        if (rows <= index * SIDE) {
            self.skip(blocks);
            continue;
        }
        if (BLOCK_SCALES) {
            const float* b_scales = b_scale_inv + note.w;
            const int second = column / BLOCK + 1 < n / BLOCK ? sizes.b_stride : 0;
            if (column % BLOCK == 0)
                self.multiply<128>(sums, b_scales, second, blocks);
            else
                self.multiply<64>(sums, b_scales, second, blocks);
        } else {
            const float a_scale = load_scale(a_scale_inv + note.w * sizes.a_stride);
            const float b_scale = load_scale(b_scale_inv + note.w * sizes.b_stride);
            if (FAST_SUMS)
                self.multiply_fast(sums, blocks);
            else
                self.multiply(sums, blocks);
            self.a_scale = a_scale;
            self.b_scale = b_scale;
        }
        self.out = out + (long long)(first + warp * 16) * n + column;
        self.rows = rows - warp * 16;
        self.columns = n - column;
    }
    self.store(sums);
}

// --- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    rows_kernel(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const float* a_scale_inv,
                unsigned short* out, const float* b_scale_inv, const int* ends_e, const __grid_constant__ Sizes sizes) {
    const u32 memory = shared_address(shared_memory);
    make_barriers<STAGES>(memory + FULL_AT, memory + EMPTY_AT, CLUSTER * CONSUMER_WARPS);
    if (threadIdx.x >= CONSUMER_WARPS * 32) {
        few_registers();
        if (same(threadIdx.x / 32) == CONSUMER_WARPS)
            copy_tiles(&a, &b, a_scale_inv, ends_e, sizes, memory);
    } else {
        many_registers();
        multiply_tiles(out, a_scale_inv, b_scale_inv, sizes, memory);
    }
    cluster_sync();  // wait until the peer's copies and arrivals are over
}
