// Sums over each expert's rows of outer products, with scales of blocks, for Hopper (sm_90a): weight gradients.
//
//     out[i, j] = sum over blocks of 128 rows of (a[i, block] · b[j, block]) · b_scale_inv · a_scale_inv  (+ out[i, j])
//
// a `[p, rows]` and b `[q, rows]`: FP8, the rows of all experts beside each other, each expert's padded with zeros to a
// multiple of 128; a scale for each block 1 × 128. out `[e·p, q]`: one expert after the other, fp32, or bf16 or
// fp16 that nothing is added to. Rows of an earlier micro-batch, which have operands of their own, come before. p and q
// are multiples of 128. `megafp8/kernels/grouped_gemm_cuda.py` compiles and launches it, behind `hopper.cuh`. Macros:
// RESULT_BYTES, 4 or 2; B_BOX_ROWS, half of the columns of a tile; and what a launch is made with (asserted below).
//
// The problem: besides what `grouped_gemm_cuda.cu` says, each column of a tile has a scale of its own, which threads
// read from shared memory; and where experts have few rows, reading and writing fp32 sums takes longer than products.
//
// *Roles*, *clusters* and *units* are those of `grouped_gemm_cuda.cu`, with tiles of 128 × 192, or 128 × 128 for
// experts with few rows: results then take 2 of 6 stages instead of 3 of 5, which leaves 4 instead of 2 for operands of
// the next tile meanwhile. A consumer has half of the rows and all columns of a tile. Half of the columns and all rows
// would be half as many scales to read, but products half as wide, so that both consumers read all of a: of 768 cycles
// that a block of 128 × 192 takes the tensor cores, they read shared memory for 640 instead of 512, and copies write to
// it for 330. That was 4 to 16% slower; reads of scales wait for free cycles, while the other consumer's products run.
//
// *Results* pass through stages of the ring. Behind a tile's last block the producer hands out a stage for each 64
// columns of the tile, in which it has copied what is added to. Consumers add their sums there, the copy engine stores
// them from there, and consumers go on with the next tile: they free such a stage when they next have begun a product.
// An expert without rows has results only: zeros, or, where sums are added, none.

constexpr int BLOCK = 128;        // rows that share a scale, read at once; rows of a tile
constexpr int SIDE = 64;          // rows of a product
constexpr int HALF = B_BOX_ROWS;  // columns that one multiprocessor copies for both
constexpr int WIDTH = 2 * HALF;   // columns of a tile
constexpr int PART = 64;          // columns of results in a stage
constexpr int BOX = 32;           // columns of results that are copied at once
constexpr int STAGES = WIDTH > 128 ? 5 : 6;  // blocks or parts of results in shared memory
constexpr int GROUP = 8;          // units next to each other in a column, before the next column: for the L2 cache
constexpr int CLUSTER = 2;        // multiprocessors
constexpr int CONSUMER_WARPS = 8;
constexpr int THREADS = 384;      // three warpgroups, as registers are given to warpgroups; the producer is in the last

constexpr int A_BYTES = BLOCK * BLOCK, B_BYTES = WIDTH * BLOCK, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int A_SCALE_BYTES = BLOCK * 4, SCALE_BYTES = A_SCALE_BYTES + WIDTH * 4;
constexpr int BOX_BYTES = SIDE * BOX * 4;  // of half of the rows, in fp32; a stage has two for each consumer
static_assert(4 * BOX_BYTES <= STAGE_BYTES && WIDTH / PART < STAGES, "");

// Offsets in shared memory. Operands and boxes begin at multiples of 1024, as their swizzle wants.
constexpr int SCALES_AT = STAGES * STAGE_BYTES;
constexpr int NOTES_AT = SCALES_AT + STAGES * SCALE_BYTES;
constexpr int FULL_AT = NOTES_AT + STAGES * 16;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
static_assert(EMPTY_AT + STAGES * 8 == LAUNCHED_SHARED_BYTES && CLUSTER == LAUNCHED_CLUSTER, "");
static_assert(THREADS == LAUNCHED_THREADS && BLOCK == A_BOX_ROWS, "");
static_assert(SIDE == ADDED_BOX_ROWS && SIDE / 4 == STORED_BOX_ROWS && BOX == BOX_COLUMNS, "");

// Operands of a micro-batch.
struct Operands {
    TensorMap a, b;
    const float *a_scale_inv, *b_scale_inv;
    const int* ends_e;       // where the rows of each expert end; null: there is no such micro-batch
    int a_stride, b_stride;  // from the scales of a block of rows to the next
};

struct Sizes { int p, q, experts, accumulate; };

// --- tiles -----------------------------------------------------------------------------------------------------------

// The units of a cluster, expert by expert: two tiles one above the other, which share b; or, in the last row of an odd
// number of rows of tiles, beside each other.
//
// Most units are whole: two tiles with all columns. They are dealt to the clusters in turn. So are the small ones,
// which are narrower or have one tile, but from the last cluster on: clusters with one whole unit fewer have one small
// unit more.
struct Walk {
    int clusters, rank;
    Sizes sizes;
    const int *ends_e, *earlier_ends_e;
    int full_columns, across;                 // columns of tiles: of full width; all
    int pairs, left;                          // rows of tiles: pairs of them; those left over, 0 or 1
    int expert, first, stop;                  // the expert's blocks of rows
    int earlier_first, earlier_stop;          // the same of the earlier micro-batch
    int whole_first, whole_stop, whole_next;  // of the expert; the next of the cluster
    int small_first, small_stop, small_next;
    int row, column, width;                   // the tile
    int parts;                                // of the unit's wider tile: stages that results pass through
    bool shared, idle;                        // both tiles have the same rows of b; no tile in this unit

    __device__ Walk(const int* ends_e, const int* earlier_ends_e, const Sizes& sizes, int clusters, int cluster,
                    int rank)
        : clusters(clusters), rank(rank), sizes(sizes), ends_e(ends_e), earlier_ends_e(earlier_ends_e),
          full_columns(sizes.q / WIDTH), across((sizes.q + WIDTH - 1) / WIDTH), pairs(sizes.p / BLOCK / 2),
          left(sizes.p / BLOCK % 2), expert(-1), first(0), stop(0), earlier_first(0), earlier_stop(0), whole_stop(0),
          whole_next(cluster), small_stop(0), small_next(clusters - 1 - cluster) {}

    __device__ int blocks() const { return stop - first + earlier_stop - earlier_first; }

    __device__ void next_expert() {
        first = stop;
        stop = ends_e[++expert] / BLOCK;
        earlier_first = earlier_stop;
        if (earlier_ends_e) earlier_stop = earlier_ends_e[expert] / BLOCK;
        whole_first = whole_stop;
        small_first = small_stop;
        if (sizes.accumulate && blocks() == 0) return;
        whole_stop += pairs * full_columns + left * (across / 2);
        small_stop += pairs * (across - full_columns) + left * (across % 2);
    }

    __device__ void place_whole(int index) {
        if (index < pairs * full_columns) {
            const int group = index / (GROUP * full_columns), within = index % (GROUP * full_columns);
            const int height = min(pairs - group * GROUP, GROUP);
            place(2 * (group * GROUP + within % height) + rank, within / height, true, false);
        } else {
            place(2 * pairs, 2 * (index - pairs * full_columns) + rank, false, false);
            parts = WIDTH / PART;  // of the left one
        }
    }

    __device__ void place_small(int index) {
        if (index < pairs * (across - full_columns))
            place(2 * index + rank, full_columns, true, false);
        else
            place(2 * pairs, across - 1, false, rank > 0);
    }

    __device__ void place(int i, int j, bool of_b, bool none) {
        row = i * BLOCK;
        column = j * WIDTH;
        width = min(sizes.q - column, WIDTH);
        parts = width / PART;
        shared = of_b;
        idle = none;
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
            if (expert + 1 == sizes.experts) return false;
            next_expert();
        }
    }
};

// --- producer --------------------------------------------------------------------------------------------------------

using Ring = RingOf<STAGES>;

struct Producer {
    const TensorMap* added;  // the results, in boxes of half of the rows of a tile
    u32 memory, rank;
    Ring ring;

    // Waits for a free stage; `bytes` will be copied to it. Notes the tile if `noted`.
    __device__ __forceinline__ u32 begin_stage(const Walk& at, bool noted, u32 bytes) {
        const u32 full = memory + FULL_AT + ring.stage * 8;
        wait(memory + EMPTY_AT + ring.stage * 8, ring.parity);
        if (elected()) {
            if (noted)
                store_note(memory + NOTES_AT + ring.stage * 16, at.expert * at.sizes.p + at.row,
                           at.idle ? -1 : at.column, at.blocks(), at.parts);
            arrive_and_expect(full, bytes);
        }
        return full;
    }

    // The blocks of rows from `start` to `end`; the first is noted if `noted`.
    __device__ __forceinline__ void copy_blocks(const Walk& at, const Operands* x, int start, int end, bool noted) {
        const bool second_b = at.width > HALF;
        const u32 b_bytes = second_b ? B_BYTES : B_BYTES / 2, b_scale_bytes = at.width * 4;
        const u32 bytes = at.idle ? 0 : A_BYTES + b_bytes + A_SCALE_BYTES + b_scale_bytes;
        const float* a_scales = x->a_scale_inv + (long long)start * x->a_stride + at.row;
        const float* b_scales = x->b_scale_inv + (long long)start * x->b_stride + at.column;
#pragma unroll 1
        for (int i = start; i < end; ++i) {
            const u32 full = begin_stage(at, noted && i == start, bytes);
            if (!at.idle && elected()) {
                const u32 a_to = memory + ring.stage * STAGE_BYTES, b_to = a_to + A_BYTES;
                const u32 scales_to = memory + SCALES_AT + ring.stage * SCALE_BYTES;
                copy_box(&x->a, a_to, i * BLOCK, at.row, full);
                if (at.shared) {
                    if (rank == 0 || second_b)
                        copy_box_to_both(&x->b, b_to + rank * (B_BYTES / 2), i * BLOCK, at.column + rank * HALF, full);
                } else {
                    copy_box(&x->b, b_to, i * BLOCK, at.column, full);
                    if (second_b) copy_box(&x->b, b_to + B_BYTES / 2, i * BLOCK, at.column + HALF, full);
                }
                copy_scales(scales_to, a_scales, A_SCALE_BYTES, full);
                copy_scales(scales_to + A_SCALE_BYTES, b_scales, b_scale_bytes, full);
            }
            a_scales += x->a_stride;
            b_scales += x->b_stride;
            ring.next();
        }
    }

    // Stages for results, with what is added to.
    __device__ __forceinline__ void copy_added(const Walk& at) {
#pragma unroll 1
        for (int part = 0; part < at.parts; ++part) {
            const bool some = at.sizes.accumulate && !at.idle && part * PART < at.width;
            const u32 full = begin_stage(at, part == 0, some ? 4 * BOX_BYTES : 0);
            if (some && elected()) {
#pragma unroll
                for (int box = 0; box < 4; ++box)
                    copy_box(added, memory + ring.stage * STAGE_BYTES + box * BOX_BYTES,
                             at.column + part * PART + box % 2 * BOX,
                             at.expert * at.sizes.p + at.row + box / 2 * SIDE, full);
            }
            ring.next();
        }
    }

    __device__ __forceinline__ void copy_tiles(const Operands* earlier, const Operands* now, const Sizes& sizes) {
        Walk at(now->ends_e, earlier->ends_e, sizes, gridDim.x / CLUSTER, blockIdx.x / CLUSTER, rank);
        while (at.next()) {
            copy_blocks(at, earlier, at.earlier_first, at.earlier_stop, true);
            copy_blocks(at, now, at.first, at.stop, at.earlier_first == at.earlier_stop);
            copy_added(at);
        }
        wait(memory + EMPTY_AT + ring.stage * 8, ring.parity);
        if (elected()) {
            store_note(memory + NOTES_AT + ring.stage * 16, -1, 0, 0, 0);  // no more tiles
            arrive(memory + FULL_AT + ring.stage * 8);
        }
    }
};

// --- consumers -------------------------------------------------------------------------------------------------------

struct Consumer {
    const TensorMap* out;  // in boxes of a warp's 16 rows
    u32 memory;
    int lane, warp, index;  // warp: of the consumer; index: of the consumer itself
    bool accumulate;
    Ring ring;
    u32 stored;   // the first stage from which results are being stored
    int storing;  // how many such stages there are

    __device__ __forceinline__ void wait_full() { wait(memory + FULL_AT + ring.stage * 8, ring.parity); }

    // The warp has read its part of the stage.
    __device__ __forceinline__ void release() {
        if (lane < CLUSTER) arrive_at(memory + EMPTY_AT + ring.stage * 8, lane);
    }

    // The same of the first stage from which results are being stored, once they are read.
    __device__ __forceinline__ void release_stored() {
        if (elected()) {
            if (storing == 1)
                wait_stores_read();
            else if (storing == 2)
                wait_stores_read<1>();
            else
                wait_stores_read<2>();
            for (u32 rank = 0; rank < CLUSTER; ++rank) arrive_at(memory + EMPTY_AT + stored * 8, rank);
        }
        __syncwarp();
        stored = stored + 1 == STAGES ? 0 : stored + 1;
        --storing;
    }

    // sums += product · scales, for four of the pairs of columns in which a thread has sums, of two rows.
    template <int SIZE>
    __device__ __forceinline__ void add_scaled(float (&sums)[SIZE], const float (&product)[SIZE],
                                               const float2 (&columns)[SIZE / 4], int from, float low, float high) {
#pragma unroll
        for (int pair = from; pair < from + 4; ++pair) {
            const int i = pair * 4;
            sums[i] = __fmaf_rn(__fmul_rn(product[i], columns[pair].x), low, sums[i]);
            sums[i + 1] = __fmaf_rn(__fmul_rn(product[i + 1], columns[pair].y), low, sums[i + 1]);
            sums[i + 2] = __fmaf_rn(__fmul_rn(product[i + 2], columns[pair].x), high, sums[i + 2]);
            sums[i + 3] = __fmaf_rn(__fmul_rn(product[i + 3], columns[pair].y), high, sums[i + 3]);
        }
    }

    // sums += product · scales of one block. a, b: the consumer's operands in the first stage. row, column: the first
    // that the thread has sums of.
    template <int COLUMNS>
    __device__ __forceinline__ void add_block(float (&sums)[COLUMNS / 2], u32 a, u32 b, int row, int column) {
        constexpr int PAIRS = COLUMNS / 8;  // of columns
        float product[COLUMNS / 2];
        float2 columns[PAIRS];
        wait_full();
        const u32 at = ring.stage * (STAGE_BYTES / 16);
        const u32 scales = memory + SCALES_AT + ring.stage * SCALE_BYTES;
        const u32 column_scales = scales + A_SCALE_BYTES + column * 4;
        begin_product(product, operand(a + at), operand(b + at));
        if (storing > 0) release_stored();
        const float low = load_float(scales + row * 4), high = load_float(scales + (row + 8) * 4);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) columns[pair] = load_floats(column_scales + pair * 32);
        wait_product();
        computed(product);
#pragma unroll
        for (int from = 0; from < PAIRS; from += 4) {
            add_scaled(sums, product, columns, from, low, high);
            if (from + 4 < PAIRS)  // now there are registers for the next columns
#pragma unroll
                for (int pair = from + 4; pair < from + 8; ++pair)
                    columns[pair] = load_floats(column_scales + pair * 32);
            if (from + 8 == PAIRS) {
                __syncwarp();  // all lanes have read the last scales
                release();
            }
        }
        ring.next();
    }

    // A warp's 16 × 32 results in a box, whose rows of 128 bytes are swizzled: the number of a chunk of 16 bytes is
    // XORed with that of its row. Odd rows begin with the second half of the columns: else two rows meet in a bank.
    __device__ __forceinline__ void add_or_write(u32 box, const float* sums) {
        const int lane = own_lane(), row = lane / 4, odd = row % 2, pair = lane % 4;
        const u32 to = box + (warp * 16 + row) * 128 + pair % 2 * 8;
        const u32 swizzle = (u32)(odd * 4 ^ pair / 2 ^ row) * 16;
        float2 low[4], high[4];
        if (accumulate) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low[i] = load_floats(to + (i * 32 ^ swizzle));
                high[i] = load_floats(to + (i * 32 ^ swizzle) + 8 * 128);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = odd ? sums[(i ^ 2) * 4 + j] : sums[i * 4 + j];
            if (accumulate) {
                x[0] = __fadd_rn(x[0], low[i].x);
                x[1] = __fadd_rn(x[1], low[i].y);
                x[2] = __fadd_rn(x[2], high[i].x);
                x[3] = __fadd_rn(x[3], high[i].y);
            }
            store_floats(to + (i * 32 ^ swizzle), x[0], x[1]);
            store_floats(to + (i * 32 ^ swizzle) + 8 * 128, x[2], x[3]);
        }
    }

    // The same results in 16 bits, written. Rows have 64 bytes: the number of a chunk of 16 bytes is XORed with half of
    // that of its row.
    __device__ __forceinline__ void write_16_bits(u32 box, const float* sums) {
        const int lane = own_lane(), row = lane % 16;
        const u32 to = box + warp * (BOX_BYTES / 4) + row * 64, chunk = (lane / 16 ^ row / 2 % 4) * 16;
        store_results(to + chunk, sums);
        store_results(to + (chunk ^ 32), sums + 8);
    }

    // The consumer's results, through the stages for them.
    template <int COLUMNS>
    __device__ __forceinline__ void store(const float (&sums)[COLUMNS / 2]) {
        while (storing > 0) release_stored();
        stored = ring.stage;
        wait_full();
        const int4 note = load_16_bytes(memory + NOTES_AT + ring.stage * 16);
        const int row = same(note.x) + index * SIDE + warp * 16, column = same(note.y), parts = same(note.w);
#pragma unroll
        for (int part = 0; part < COLUMNS / PART; ++part) {
            wait_full();
            const u32 boxes = memory + ring.stage * STAGE_BYTES + index * (2 * BOX_BYTES);
#pragma unroll
            for (int box = 0; box < 2; ++box) {
                const float* of_box = &sums[part * (PART / 2) + box * (BOX / 2)];
                if constexpr (RESULT_BYTES == 4)
                    add_or_write(boxes + box * BOX_BYTES, of_box);
                else
                    write_16_bits(boxes + box * BOX_BYTES, of_box);
            }
            fence_written();
            __syncwarp();
            if (elected()) {
#pragma unroll
                for (int box = 0; box < 2; ++box)
                    begin_store_box(out, boxes + box * BOX_BYTES + warp * (BOX_BYTES / 4),
                                    column + part * PART + box * BOX, row);
                commit_stores();
            }
            __syncwarp();
            ++storing;
            ring.next();
        }
        if (parts > COLUMNS / PART) {  // for the unit's other tile
            while (storing > 0) release_stored();
            skip(parts - COLUMNS / PART);
        }
    }

    template <int COLUMNS>
    __device__ __forceinline__ void tile(u32 a, u32 b, int blocks) {
        float sums[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.f;
        const int row = index * SIDE + warp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) add_block<COLUMNS>(sums, a, b, row, column);
        store<COLUMNS>(sums);
    }

    // Stages in which there is nothing for it.
    __device__ __forceinline__ void skip(int stages) {
        for (int i = 0; i < stages; ++i) {
            wait_full();
            __syncwarp();  // all lanes have seen it full
            release();
            ring.next();
        }
    }

    __device__ __forceinline__ void multiply_tiles(int q) {
        // kept in registers of the warp: otherwise computed anew for each block
        const u32 a = same(operand_at(memory + index * (A_BYTES / 2)));
        const u32 b = same(operand_at(memory + A_BYTES));
        while (true) {
            wait_full();
            const int4 note = load_16_bytes(memory + NOTES_AT + ring.stage * 16);
            const int row = same(note.x), column = same(note.y), blocks = same(note.z), parts = same(note.w);
            if (row < 0) break;
            if (column < 0) {
                while (storing > 0) release_stored();
                skip(blocks + parts);
            } else if (WIDTH > 128 && q - column == 64) {
                tile<64>(a, b, blocks);
            } else if (WIDTH > 128 && q - column == 128) {
                tile<128>(a, b, blocks);
            } else {
                tile<WIDTH>(a, b, blocks);
            }
        }
        wait_stores_read();  // shared memory is there as long
    }
};

// --- the kernel ------------------------------------------------------------------------------------------------------

// `out` and `added` are both the results.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    sums_kernel(const __grid_constant__ Operands earlier, const __grid_constant__ Operands now,
                const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap added,
                const __grid_constant__ Sizes sizes) {
    const u32 memory = shared_address(shared_memory);
    make_barriers<STAGES>(memory + FULL_AT, memory + EMPTY_AT, CLUSTER * CONSUMER_WARPS);
    const int warp = same(threadIdx.x / 32);
    if (threadIdx.x >= CONSUMER_WARPS * 32) {
        few_registers();
        if (warp == CONSUMER_WARPS) {
            Producer producer = {&added, memory, cluster_rank(), {0, 1}};  // the first round of stages is free
            producer.copy_tiles(&earlier, &now, sizes);
        }
    } else {
        many_registers();
        const int lane = threadIdx.x % 32;
        Consumer consumer = {&out, memory, lane, warp % 4, warp / 4, sizes.accumulate != 0, {0, 0}, 0, 0};
        consumer.multiply_tiles(sizes.q);
    }
    cluster_sync();  // the peer's copies and arrivals are over
}
