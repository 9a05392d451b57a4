/* Products with a matrix of weights that was packed once: y = f(x w' + b), x [m, k] and w [n, k], sums in float.

   A packed matrix is panels of 32 rows of w. A panel holds, for each number along k, that number of each of its rows,
   or of bf16 each pair of neighbors: what two vdpbf16ps take. The panel's columns of y are computed for a tile of rows
   of x at a time, whose sums stay in registers; the last panel is padded with zeros. In a gated matrix the first 16
   rows of a panel are gates and the other 16 the values that they multiply.

   There are two kinds of arithmetic: of pairs of bf16 (matmul_bf16.h), where the processor has it, and of floats
   (matmul_float.h), with weights that may be stored in 16 bits and are widened on the way. */

#include <omp.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels.h"
#include "matmul_bf16.h"
#include "matmul_float.h"

int multiplies_bf16(void);

/* With few rows, weights are read as fast as they come: in long runs, which are read ahead, by software too where a
   tile takes its time. */
enum { FEW_FLOAT_TILES = 2, RUN_BYTES = 1 << 18, ROWS_READ_AHEAD = 6, BYTES_AHEAD = 1 << 13 };
/* With many, a block of rows stays in the processor's second cache while all panels pass, unless it were smaller than
   LEAST_TILES. In float only DEPTH numbers of each row have to stay there (measured: docs/performance.md). */
enum { BLOCK_BYTES = 1 << 19, LEAST_TILES = 4, FLOAT_BLOCK_ROWS = 192 };

typedef struct {
    const packed_matrix *matrix;
    const void *x;
    void *y;
    ptrdiff_t m, panels, run; /* panels of one unit of work, the last of which may have fewer */
    ptrdiff_t blocks, runs;   /* of rows, and of each block; units are in the order of blocks */
    int few;
} product;

typedef struct {
    ptrdiff_t first, rows, tiles;
    const void *x;
    int gathered; /* each tile of x as matmul_bf16.h says */
} row_block;

/* Where each thread gathers its block of rows: no thread's stack has to be as large. */
typedef struct {
    ptrdiff_t count;
    _Alignas(64) bf16 of[][BLOCK_BYTES / sizeof(bf16)];
} gathering_rooms;

static product make_product(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y);
static gathering_rooms *take_rooms(ptrdiff_t count);
static void free_rooms(gathering_rooms *rooms);
static void multiply_units(const product *p, bf16 *room, ptrdiff_t first, ptrdiff_t end, int backward,
                           ptrdiff_t *taken);
static void enter_block(const product *p, ptrdiff_t index, bf16 *room, row_block *block);
static void multiply_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next);

/* Two threads share a part of the units, and take them one by one from its two ends, each with its own blocks. With few
   rows all threads take from one place: memory is quicker where what they read is near. */
void packed_matmul(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y) {
    product p = make_product(matrix, x, m, y);
    ptrdiff_t most = omp_get_max_threads(), units = p.blocks * p.runs, pairs = (most + 1) / 2, taken[pairs];
    gathering_rooms *rooms = p.few || matrix->floats ? NULL : take_rooms(most);
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

/* How many blocks m rows make. */
static ptrdiff_t count_blocks(const packed_matrix *matrix, ptrdiff_t m) {
    if (matrix->floats)
        return (m + FLOAT_BLOCK_ROWS - 1) / FLOAT_BLOCK_ROWS;
    ptrdiff_t most = BLOCK_BYTES / (MOST_ROWS * matrix->k * (ptrdiff_t)sizeof(bf16)),
        tiles = (m + MOST_ROWS - 1) / MOST_ROWS;
    return most < LEAST_TILES ? tiles > 0 : (tiles + most - 1) / most;
}

static product make_product(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y) {
    ptrdiff_t panel_bytes = PANEL * matrix->k * stored_size(matrix->stored), panels = (matrix->n + PANEL - 1) / PANEL;
    int few = m <= (matrix->floats ? FEW_FLOAT_TILES * TILE_ROWS : MOST_ROWS);
    ptrdiff_t run = few && panel_bytes < RUN_BYTES ? RUN_BYTES / panel_bytes : 1;
    return (product){matrix, x, y, m, panels, run, count_blocks(matrix, m), (panels + run - 1) / run, few};
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
    ptrdiff_t k = p->matrix->k, first = p->m * index / p->blocks, rows = p->m * (index + 1) / p->blocks - first,
        most = p->matrix->floats ? TILE_ROWS : MOST_ROWS;
    const char *x = (const char *)p->x + first * k * (ptrdiff_t)(p->matrix->floats ? sizeof(float) : sizeof(bf16));
    *block = (row_block){first, rows, (rows + most - 1) / most, x, 0};
#ifdef __AVX512BF16__
    if (!room || block->tiles == 1 || rows * k > BLOCK_BYTES / (ptrdiff_t)sizeof(bf16))
        return;
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int count = tile_rows(block, tile, row);
        gather_rows((const bf16 *)block->x + row * k, k, count, room + row * k);
        row += count;
    }
    block->x = room, block->gathered = 1;
#else
    (void)room;
#endif
}

/* The columns of y that a panel gives. */
typedef struct {
    ptrdiff_t first, filled; /* their first, and how many, which are fewer in the last panel */
    ptrdiff_t width;         /* of a row of y */
    const void *weights;
    const float *bias;
} panel_columns;

static panel_columns columns_of(const packed_matrix *matrix, ptrdiff_t panel) {
    ptrdiff_t width = matrix->gated ? matrix->n / 2 : matrix->n, most = matrix->gated ? HALF : PANEL;
    const char *weights = (const char *)matrix->panels + panel * PANEL * matrix->k * stored_size(matrix->stored);
    ptrdiff_t left = width - panel * most;
    return (panel_columns){panel * most, left < most ? left : most, width, weights,
                           matrix->bias ? matrix->bias + panel * PANEL : NULL};
}

/* A block of many rows with a panel, to sums [rows][PANEL]. Prefetches into the second cache what is widened next. */
static void multiply_widened(const packed_matrix *matrix, const row_block *block, const char *weights, float *sums) {
    float strips[DEPTH * PANEL] __attribute__((aligned(64)));
    ptrdiff_t k = matrix->k, step = PANEL * stored_size(matrix->stored);
    for (ptrdiff_t first = 0; first < k; first += DEPTH) {
        ptrdiff_t count = k - first < DEPTH ? k - first : DEPTH;
        ptrdiff_t fetched = ((DEPTH * step + block->tiles - 1) / block->tiles + 63) / 64 * 64;
        const char *ahead = weights + (first + count) * step;
        widen_strips(matrix->stored, weights, first, count, strips);
        for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++, ahead += fetched) {
            int rows = tile_rows(block, tile, row);
            for (ptrdiff_t line = 0; line < fetched; line += 64)
                __builtin_prefetch(ahead + line, 0, 2);
            for (ptrdiff_t column = 0; column < PANEL; column += STRIP)
                multiply_strips[rows - 1](first == 0, (const float *)block->x + row * k + first, k, count,
                                          strips + column * count, sums + row * PANEL + column);
            row += rows;
        }
    }
}

static void multiply_float_panel(const product *p, const row_block *block, ptrdiff_t panel) {
    float sums[FLOAT_BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    const packed_matrix *matrix = p->matrix;
    panel_columns columns = columns_of(matrix, panel);
    if (!p->few)
        multiply_widened(matrix, block, columns.weights, sums);
    else
        for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
            int rows = tile_rows(block, tile, row);
            multiply_few_rows[rows - 1](matrix->stored, (const float *)block->x + row * matrix->k, matrix->k,
                                        columns.weights, sums + row * PANEL);
            row += rows;
        }
    finish_floats(matrix->activation, matrix->gated, columns.bias, block->rows, sums,
                  (float *)p->y + block->first * columns.width + columns.first, columns.width, columns.filled);
}

#ifdef __AVX512BF16__

int multiplies_bf16(void) {
    return 1;
}

/* `next` is the panel that the thread will come to behind this one, if it is one of the matrix. */
static void multiply_bf16_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next) {
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    const packed_matrix *matrix = p->matrix;
    ptrdiff_t k = matrix->k;
    panel_columns columns = columns_of(matrix, panel);
    size_t size = matrix->to_float ? sizeof(float) : sizeof(bf16);
    prefetching ahead = {NULL, 0};
    if (block->tiles > 1 && next >= 0 && next < p->panels)
        ahead = (prefetching){columns_of(matrix, next).weights, (int)((PANEL + block->tiles - 1) / block->tiles)};
    else if (block->tiles == 1 && block->rows >= ROWS_READ_AHEAD)
        ahead = (prefetching){(const char *)columns.weights + BYTES_AHEAD, PANEL};
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int rows = tile_rows(block, tile, row);
        multiply_rows[rows - 1](block->gathered, (const bf16 *)block->x + row * k, k, columns.weights, ahead, sums);
        void *to = (char *)p->y + (size_t)((block->first + row) * columns.width + columns.first) * size;
        finish(matrix->activation, matrix->gated, matrix->to_float, columns.bias, rows, sums, to, columns.width,
               (int)columns.filled);
        ahead.at += (k + CHUNK - 1) / CHUNK * ahead.lines * 64;
        row += rows;
    }
}

static void multiply_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next) {
    if (p->matrix->floats)
        multiply_float_panel(p, block, panel);
    else
        multiply_bf16_panel(p, block, panel, next);
}

#else

int multiplies_bf16(void) {
    return 0;
}

static void multiply_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next) {
    (void)next;
    multiply_float_panel(p, block, panel);
}

#endif
