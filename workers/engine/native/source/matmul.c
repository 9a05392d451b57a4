/* Products with a matrix of weights that was packed once: y = f(x w' + b), x [m, k] and w [n, k] in bf16, sums in
   float.

   A packed matrix is panels of 32 rows of w. A panel holds, for each pair of neighbors along k, the pair of each of
   its rows: what two vdpbf16ps take. The panel's columns of y are computed for up to 12 rows of x at a time, whose sums
   stay in registers; the last panel is padded with zeros. In a gated matrix the first 16 rows of a panel are gates and
   the other 16 what they let through. */

#include <omp.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include "kernels.h"
#include "matmul_tile.h"

struct packed_matrix {
    const bf16 *panels; /* [ceil(n / 32)][k / 2][32][2] */
    /* [ceil(n / 32)][32] in the order of the panels' rows, padded as they are and read so; NULL for none */
    const bf16 *bias;
    ptrdiff_t n, k;     /* k is even */
    int activation;     /* one of activation.h's */
    int gated;          /* y [m, n / 2] */
    int to_float;       /* y in float instead of bf16 */
};

int matmul_supported(void);
void pack_rows(const bf16 *w, ptrdiff_t n, ptrdiff_t k, int gated, bf16 *panels);
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, bf16 *y);

/* Which row of w is row `lane` of a panel; n or more for padding. */
static inline ptrdiff_t source_row(ptrdiff_t panel, ptrdiff_t lane, ptrdiff_t n, int gated) {
    if (!gated)
        return panel * PANEL + lane;
    ptrdiff_t row = panel * HALF + lane % HALF;
    if (row >= n / 2)
        return n;
    return lane < HALF ? row : n / 2 + row;
}

void pack_rows(const bf16 *w, ptrdiff_t n, ptrdiff_t k, int gated, bf16 *panels) {
#pragma omp parallel for
    for (ptrdiff_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        bf16 *to = panels + panel * PANEL * k;
        for (ptrdiff_t lane = 0; lane < PANEL; lane++) {
            ptrdiff_t row = source_row(panel, lane, n, gated);
            for (ptrdiff_t i = 0; i < k; i++)
                to[i / 2 * 2 * PANEL + 2 * lane + i % 2] = row < n ? w[row * k + i] : 0;
        }
    }
}

/* y [count, k]: rows of w themselves, as an embedding table gives them. Not for gated matrices. */
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, bf16 *y) {
    ptrdiff_t k = matrix->k;
#pragma omp parallel for if (count > 64)
    for (ptrdiff_t i = 0; i < count; i++) {
        const bf16 *from = matrix->panels + rows[i] / PANEL * PANEL * k + rows[i] % PANEL * 2;
        for (ptrdiff_t pair = 0; pair < k / 2; pair++)
            memcpy(y + i * k + 2 * pair, from + pair * 2 * PANEL, 2 * sizeof(bf16));
    }
}

#ifdef __AVX512BF16__

/* With few rows, weights are read as fast as they come: in long runs, which are read ahead, by software too where a
   tile takes its time. */
enum { FEW_ROWS = MOST_ROWS, RUN_BYTES = 1 << 18, ROWS_READ_AHEAD = 6, BYTES_AHEAD = 1 << 13 };
/* With many, a block of rows stays in the processor's second cache while all panels pass, unless it were smaller than
   LEAST_TILES. */
enum { BLOCK_BYTES = 1 << 19, LEAST_TILES = 4 };

typedef struct {
    const packed_matrix *matrix;
    const bf16 *x;
    void *y;
    ptrdiff_t m, panels, run; /* panels of one unit of work, the last of which may have fewer */
    ptrdiff_t blocks, runs;   /* of rows, and of each block; units are in the order of blocks */
    int few;
} product;

typedef struct {
    ptrdiff_t first, rows, tiles;
    const bf16 *x;
    int gathered; /* each tile of x as matmul_tile.h says */
} row_block;

/* Where each thread gathers its block of rows: no thread's stack has to be as large. */
typedef struct {
    ptrdiff_t count;
    _Alignas(64) bf16 of[][BLOCK_BYTES / sizeof(bf16)];
} gathering_rooms;

static product make_product(const packed_matrix *matrix, const bf16 *x, ptrdiff_t m, void *y);
static gathering_rooms *take_rooms(ptrdiff_t count);
static void free_rooms(gathering_rooms *rooms);
static void multiply_units(const product *p, bf16 *room, ptrdiff_t first, ptrdiff_t end, int backward,
                           ptrdiff_t *taken);
static void enter_block(const product *p, ptrdiff_t index, bf16 *room, row_block *block);
static void multiply_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next);

int matmul_supported(void) {
    return 1;
}

/* Two threads share a part of the units, and take them one by one from its two ends, each with its own blocks. With few
   rows all threads take from one place: memory is quicker where what they read is near. */
void packed_matmul(const packed_matrix *matrix, const bf16 *x, ptrdiff_t m, void *y) {
    product p = make_product(matrix, x, m, y);
    ptrdiff_t most = omp_get_max_threads(), units = p.blocks * p.runs, pairs = (most + 1) / 2, taken[pairs];
    gathering_rooms *rooms = p.few ? NULL : take_rooms(most);
    memset(taken, 0, sizeof taken);
#pragma omp parallel
    {
        ptrdiff_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), pair = thread / 2;
        bf16 *room = rooms ? rooms->of[thread] : NULL;
        ptrdiff_t behind = 2 * pair + 2 < threads ? 2 * pair + 2 : threads;
        if (p.few)
            multiply_units(&p, room, 0, units, 0, &taken[0]);
        else
            multiply_units(&p, room, units * 2 * pair / threads, units * behind / threads, thread % 2, &taken[pair]);
    }
    free_rooms(rooms);
}

/* Kept from call to call. Calls at the same time have rooms of their own, of which the last to end leaves its. */
static gathering_rooms *_Atomic kept_rooms;

/* NULL where there is no memory for them. */
static gathering_rooms *take_rooms(ptrdiff_t count) {
    gathering_rooms *rooms = atomic_exchange(&kept_rooms, NULL);
    if (rooms && rooms->count >= count)
        return rooms;
    free(rooms);
    rooms = aligned_alloc(_Alignof(gathering_rooms), sizeof *rooms + (size_t)count * sizeof rooms->of[0]);
    if (rooms)
        rooms->count = count;
    return rooms;
}

static void free_rooms(gathering_rooms *rooms) {
    if (rooms)
        free(atomic_exchange(&kept_rooms, rooms));
}

static product make_product(const packed_matrix *matrix, const bf16 *x, ptrdiff_t m, void *y) {
    ptrdiff_t panel_bytes = PANEL * matrix->k * (ptrdiff_t)sizeof(bf16), panels = (matrix->n + PANEL - 1) / PANEL;
    int few = m <= FEW_ROWS;
    ptrdiff_t run = few && panel_bytes < RUN_BYTES ? RUN_BYTES / panel_bytes : 1;
    ptrdiff_t most = BLOCK_BYTES / (MOST_ROWS * matrix->k * (ptrdiff_t)sizeof(bf16)),
        tiles = (m + MOST_ROWS - 1) / MOST_ROWS;
    ptrdiff_t blocks = most < LEAST_TILES ? tiles > 0 : (tiles + most - 1) / most;
    return (product){matrix, x, y, m, panels, run, blocks, (panels + run - 1) / run, few};
}

static void multiply_units(const product *p, bf16 *room, ptrdiff_t first, ptrdiff_t end, int backward,
                           ptrdiff_t *taken) {
    row_block block = {0};
    for (ptrdiff_t own = 0, held = -1;; own++) {
        ptrdiff_t ticket;
#pragma omp atomic capture
        ticket = (*taken)++;
        if (ticket >= end - first)
            return;
        ptrdiff_t unit = p->few ? ticket : backward ? end - 1 - own : first + own;
        if (unit / p->runs != held)
            enter_block(p, held = unit / p->runs, room, &block);
        ptrdiff_t panel = unit % p->runs * p->run, behind = panel + p->run < p->panels ? panel + p->run : p->panels;
        for (; panel < behind; panel++)
            multiply_panel(p, &block, panel, backward ? panel - 1 : panel + 1);
    }
}

static int tile_rows(const row_block *block, ptrdiff_t tile, ptrdiff_t done) {
    return (int)((block->rows - done + block->tiles - tile - 1) / (block->tiles - tile));
}

static void enter_block(const product *p, ptrdiff_t index, bf16 *room, row_block *block) {
    ptrdiff_t k = p->matrix->k, first = p->m * index / p->blocks, rows = p->m * (index + 1) / p->blocks - first;
    *block = (row_block){first, rows, (rows + MOST_ROWS - 1) / MOST_ROWS, p->x + first * k, 0};
    if (!room || block->tiles == 1 || rows * k > BLOCK_BYTES / (ptrdiff_t)sizeof(bf16))
        return;
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int count = tile_rows(block, tile, row);
        gather_rows(block->x + row * k, k, count, room + row * k);
        row += count;
    }
    block->x = room, block->gathered = 1;
}

/* `next` is the panel that the thread will come to behind this one, if it is one of the matrix. */
static void multiply_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next) {
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    const packed_matrix *matrix = p->matrix;
    ptrdiff_t k = matrix->k, width = matrix->gated ? matrix->n / 2 : matrix->n, columns = matrix->gated ? HALF : PANEL;
    ptrdiff_t filled = width - panel * columns < columns ? width - panel * columns : columns;
    size_t size = matrix->to_float ? sizeof(float) : sizeof(bf16);
    const bf16 *weights = matrix->panels + panel * PANEL * k,
        *bias = matrix->bias ? matrix->bias + panel * PANEL : NULL;
    prefetching ahead = {NULL, 0};
    if (block->tiles > 1 && next >= 0 && next < p->panels)
        ahead = (prefetching){(const char *)(matrix->panels + next * PANEL * k),
                              (int)((PANEL + block->tiles - 1) / block->tiles)};
    else if (block->tiles == 1 && block->rows >= ROWS_READ_AHEAD)
        ahead = (prefetching){(const char *)weights + BYTES_AHEAD, PANEL};
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int rows = tile_rows(block, tile, row);
        multiply_rows[rows - 1](block->gathered, block->x + row * k, k, weights, ahead, sums);
        void *to = (char *)p->y + (size_t)((block->first + row) * width + panel * columns) * size;
        finish(matrix->activation, matrix->gated, matrix->to_float, bias, rows, sums, to, width, (int)filled);
        ahead.at += (k + CHUNK - 1) / CHUNK * ahead.lines * 64;
        row += rows;
    }
}

#else

int matmul_supported(void) {
    return 0;
}

void packed_matmul(const packed_matrix *matrix, const bf16 *x, ptrdiff_t m, void *y) {
    (void)matrix, (void)x, (void)m, (void)y;
}

#endif
