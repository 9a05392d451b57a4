/* Products with a matrix of weights that was packed once: y = f(x w' + b), x [m, k] and w [n, k], sums in float.

   A packed matrix is panels of 32 rows of w. A panel holds, for each number along k, that number of each of its rows,
   or of bf16 each pair of neighbors: what two vdpbf16ps take. The panel's columns of y are computed for a tile of rows
   of x at a time, whose sums stay in registers; the last panel is padded with zeros. In a gated matrix the first 16
   rows of a panel are gates and the other 16 the values that they multiply.

   There are three kinds of arithmetic: of pairs of bf16 (matmul_bf16.h), where the processor has it, of floats
   (matmul_words.h), with weights that may be stored in 16 bits and are widened on the way, and of integers, where
   weights are stored in 8 or 4 bits: of quads of int8 where the processor has it (matmul_quads.h), else of pairs of
   int16 (matmul_integers.h). The same panels of bf16 and of quads are multiplied by AMX where it is there
   (matmul_tiles.h). */

#define _DEFAULT_SOURCE /* of system calls (matmul_tiles.h) */

#include <stdatomic.h>
#include <stdlib.h>

#include "kernels.h"
#include "matmul_bf16.h"
#include "matmul_words.h"
#if MULTIPLIES_QUADS
#include "matmul_quads.h"
#else
#include "matmul_integers.h"
#endif
#include "matmul_tiles.h"
#include "parallel.h"

int multiplies_bf16(void);
int multiplies_quads(void);
int use_tiles(int stored, int used);

/* With few rows, weights are read as fast as they come: in long runs, which are read ahead, by software too where a
   tile takes its time. */
enum { RUN_BYTES = 1 << 18, ROWS_READ_AHEAD = 6, BYTES_AHEAD = 1 << 13 };
#if LANES == 8
static const int few_tiles[] = {8, 8, 2, 3, 1}; /* by what weights are stored as */
#elif LANES == 16
static const int few_tiles[] = {4, 4, 2, 2, 2};
#else
static const int few_tiles[] = {2, 2, 2, 2, 2};
#endif
/* With many, a block of rows stays in the processor's second cache while all panels pass, unless it were smaller than
   LEAST_TILES. Of words only DEPTH of each row have to stay there (measured: docs/performance.md). */
enum { BLOCK_BYTES = 1 << 19, LEAST_TILES = 4, WORD_BLOCK_ROWS = LANES == 16 ? 96 : 192 };
enum { PARALLEL_NUMBERS = 1 << 14 }; /* numbers of x, from which on all threads quantize them */

typedef struct {
    const packed_matrix *matrix;
    const void *x;            /* in words unless it is multiplied in pairs of bf16, or in quads */
    const float *scales;      /* of x, where it is multiplied as integers: [m][scales_of_row] */
    const int32_t *totals;    /* [m][sums_of_row]: what numbers of x add up to, where there are such sums */
    void *y;
    ptrdiff_t m, panels, run; /* panels of one unit of work, the last of which may have fewer */
    ptrdiff_t blocks, runs;   /* of rows, and of each block; units are in the order of blocks */
    int few, by_tiles;
    ptrdiff_t scales_of_row;
    ptrdiff_t sums_of_row; /* of whole numbers: of quads, and of few rows with int4 */
} product;

typedef struct {
    ptrdiff_t first, rows, tiles;
    const void *x;
    int gathered; /* each tile of x as matmul_gather.h says */
} row_block;

/* Holds x in the order or in the numbers in which it is multiplied: no thread's stack has to be as large. */
typedef struct {
    size_t size;
    _Alignas(64) char bytes[];
} workspace;

static product make_product(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y);
static int multiplies_words(const packed_matrix *matrix);
static void begin_tiles(const product *p);
static void end_tiles(const product *p);
static size_t room_bytes(const product *p, ptrdiff_t threads);
static size_t integer_bytes(const product *p);
static workspace *take_workspace(size_t size);
static void free_workspace(workspace *space);
static void multiply_part(void *work, ptrdiff_t thread, ptrdiff_t threads);
static void quantize_rows(product *p, char *room, ptrdiff_t threads);
static void multiply_units(const product *p, uint32_t *room, ptrdiff_t first, ptrdiff_t end, int backward,
                           atomic_ptrdiff_t *taken);
static void enter_block(const product *p, ptrdiff_t index, uint32_t *room, row_block *block);
static void multiply_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next);

typedef struct {
    const product *p;
    char *rooms; /* NULL for none */
    atomic_ptrdiff_t *taken;
} shared_product;

/* Returns whether there is no memory for it. */
int packed_matmul(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y, ptrdiff_t threads) {
    product p = make_product(matrix, x, m, y);
    ptrdiff_t pairs = (threads + 1) / 2;
    atomic_ptrdiff_t taken[pairs];
    size_t rooms = room_bytes(&p, threads), size = rooms + integer_bytes(&p);
    workspace *space = size ? take_workspace(size) : NULL;
    for (ptrdiff_t pair = 0; pair < pairs; pair++)
        atomic_init(&taken[pair], 0);
    if (is_integer(matrix->stored) && m) {
        if (!space)
            return 1;
        quantize_rows(&p, space->bytes + rooms, threads);
    }
    shared_product shared = {&p, space && rooms ? space->bytes : NULL, taken};
    run_parts(multiply_part, &shared, threads);
    free_workspace(space);
    return 0;
}

/* Two threads share a part of the units, and take them one by one from its two ends, each with its own blocks. With few
   rows all threads take from one place: memory is quicker where what they read is near. */
static void multiply_part(void *work, ptrdiff_t thread, ptrdiff_t threads) {
    const shared_product *shared = work;
    const product *p = shared->p;
    ptrdiff_t units = p->blocks * p->runs, pair = thread / 2;
    uint32_t *room = shared->rooms ? (uint32_t *)(void *)(shared->rooms + thread * BLOCK_BYTES) : NULL;
    ptrdiff_t behind = 2 * pair + 2 < threads ? 2 * pair + 2 : threads;
    begin_tiles(p);
    if (p->few)
        multiply_units(p, room, 0, units, 0, &shared->taken[0]);
    else
        multiply_units(p, room, units * 2 * pair / threads, units * behind / threads, thread % 2, &shared->taken[pair]);
    end_tiles(p);
}

static int multiplies_words(const packed_matrix *matrix) {
    return is_integer(matrix->stored) ? !MULTIPLIES_QUADS : matrix->floats;
}

#if HAS_TILES

static int tiled[STORED_INT4 + 1]; /* whether tiles multiply, by what weights are stored as */

/* Returns whether they did before. Before the first product, or between two. */
int use_tiles(int stored, int used) {
    int before = tiled[stored];
    tiled[stored] = used && request_tiles();
    return before;
}

static int multiplies_tiles(const packed_matrix *matrix, ptrdiff_t m) {
    ptrdiff_t bytes = is_integer(matrix->stored) ? matrix->k : matrix->k * (ptrdiff_t)sizeof(bf16);
    int whole_groups = matrix->group >= matrix->k || matrix->group % STEP_BYTES == 0;
    if (!tiled[matrix->stored] || multiplies_words(matrix) || bytes % STEP_BYTES)
        return 0;
    return is_integer(matrix->stored) ? m >= LEAST_TILED_ROWS && whole_groups : m > 0;
}

static void begin_tiles(const product *p) {
    if (p->by_tiles)
        shape_tiles(p->m);
}

static void end_tiles(const product *p) {
    if (p->by_tiles)
        _tile_release();
}

#else

int use_tiles(int stored, int used) {
    (void)stored, (void)used;
    return 0;
}

static int multiplies_tiles(const packed_matrix *matrix, ptrdiff_t m) {
    (void)matrix, (void)m;
    return 0;
}

static void begin_tiles(const product *p) {
    (void)p;
}

static void end_tiles(const product *p) {
    (void)p;
}

#endif

/* Of a row of x as it is multiplied. */
static ptrdiff_t row_bytes(const packed_matrix *matrix) {
    return is_integer(matrix->stored) ? integer_row_bytes(matrix)
                                      : matrix->k * (ptrdiff_t)(matrix->floats ? sizeof(float) : sizeof(bf16));
}

/* Each thread's block of rows, where it is gathered. */
static size_t room_bytes(const product *p, ptrdiff_t threads) {
    return p->few || p->by_tiles || LANES < 16 || multiplies_words(p->matrix) ? 0 : (size_t)threads * BLOCK_BYTES;
}

/* x as integers, its scales and totals. */
static size_t integer_bytes(const product *p) {
    if (!is_integer(p->matrix->stored))
        return 0;
    return (size_t)(p->m * (row_bytes(p->matrix) + 4 * (p->scales_of_row + p->sums_of_row)));
}

/* Kept from call to call. Calls at the same time have workspaces of their own, of which the last to end leaves its. NULL
   where there is no memory for one; bf16 is multiplied without. */
static workspace *_Atomic kept_workspace;

static workspace *take_workspace(size_t size) {
    workspace *space = atomic_exchange(&kept_workspace, NULL);
    if (space && space->size >= size)
        return space;
    free(space);
    size_t whole = (sizeof *space + size + _Alignof(workspace) - 1) / _Alignof(workspace) * _Alignof(workspace);
    space = aligned_alloc(_Alignof(workspace), whole);
    if (space)
        space->size = size;
    return space;
}

static void free_workspace(workspace *space) {
    if (space)
        free(atomic_exchange(&kept_workspace, space));
}

typedef struct {
    const product *p;
    char *room;
    float *scales;
    int32_t *totals; /* NULL for none */
} quantized_rows;

static void quantize_range(void *work, ptrdiff_t first, ptrdiff_t end) {
    const quantized_rows *rows = work;
    const product *p = rows->p;
    const packed_matrix *matrix = p->matrix;
    ptrdiff_t from = matrix->k * (ptrdiff_t)(matrix->floats ? sizeof(float) : sizeof(bf16)), to = row_bytes(matrix);
    for (ptrdiff_t i = first; i < end; i++)
        quantize_integers(matrix, (const char *)p->x + i * from, rows->room + i * to, rows->scales + i * p->scales_of_row,
                          rows->totals ? rows->totals + i * p->sums_of_row : NULL);
}

/* The product's x becomes one of integers. */
static void quantize_rows(product *p, char *room, ptrdiff_t threads) {
    float *scales = (float *)(void *)(room + p->m * row_bytes(p->matrix));
    int32_t *totals = p->sums_of_row ? (int32_t *)(scales + p->m * p->scales_of_row) : NULL;
    quantized_rows rows = {p, room, scales, totals};
    run_ranges(quantize_range, &rows, p->m, p->m * p->matrix->k > PARALLEL_NUMBERS ? threads : 1);
    p->x = room, p->scales = scales, p->totals = totals;
}

/* How many blocks m rows make. */
static ptrdiff_t count_row_blocks(const packed_matrix *matrix, ptrdiff_t m, int by_tiles) {
    if (by_tiles)
        return count_tiled_blocks(row_bytes(matrix), m);
    if (multiplies_words(matrix))
        return (m + WORD_BLOCK_ROWS - 1) / WORD_BLOCK_ROWS;
    ptrdiff_t most = BLOCK_BYTES / (MOST_ROWS * row_bytes(matrix)),
        tiles = (m + MOST_ROWS - 1) / MOST_ROWS;
    return most < LEAST_TILES ? tiles > 0 : (tiles + most - 1) / most;
}

static product make_product(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y) {
    ptrdiff_t bytes = panel_bytes(matrix), panels = (matrix->n + PANEL - 1) / PANEL;
    int by_tiles = multiplies_tiles(matrix, m);
    int few = m <= (by_tiles                   ? ROWS_OF_A_PAIR
                    : multiplies_words(matrix) ? few_tiles[matrix->stored] * TILE_ROWS
                                               : MOST_ROWS);
    ptrdiff_t run = few && bytes < RUN_BYTES ? RUN_BYTES / bytes : 1;
    ptrdiff_t scales = 0, sums = 0;
    if (is_integer(matrix->stored))
        scales = count_scales(matrix), sums = count_sums(matrix, few);
    return (product){
        matrix, x, NULL, NULL, y, m, panels, run, count_row_blocks(matrix, m, by_tiles), (panels + run - 1) / run, few,
        by_tiles, scales, sums,
    };
}

static void multiply_units(const product *p, uint32_t *room, ptrdiff_t first, ptrdiff_t end, int backward,
                           atomic_ptrdiff_t *taken) {
    row_block block = {0};
    for (ptrdiff_t own = 0, held = -1;; own++) {
        ptrdiff_t ticket = atomic_fetch_add_explicit(taken, 1, memory_order_relaxed);
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

static void enter_block(const product *p, ptrdiff_t index, uint32_t *room, row_block *block) {
    ptrdiff_t first = p->m * index / p->blocks, rows = p->m * (index + 1) / p->blocks - first;
    int by_words = multiplies_words(p->matrix);
    ptrdiff_t most = p->by_tiles ? SIDE : by_words ? TILE_ROWS : MOST_ROWS, bytes = row_bytes(p->matrix);
    const char *x = (const char *)p->x + first * bytes;
    *block = (row_block){first, rows, (rows + most - 1) / most, x, 0};
#ifdef __AVX512F__
    ptrdiff_t words = bytes / (ptrdiff_t)sizeof(uint32_t);
    if (!room || block->tiles == 1 || rows * bytes > BLOCK_BYTES)
        return;
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int count = tile_rows(block, tile, row);
        gather_rows((const uint32_t *)block->x + row * words, words, count, room + row * words);
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
    packed_panel panel;
    const float *bias;
} panel_columns;

static panel_columns columns_of(const packed_matrix *matrix, ptrdiff_t panel) {
    ptrdiff_t width = matrix->gated ? matrix->n / 2 : matrix->n, most = matrix->gated ? HALF : PANEL;
    ptrdiff_t left = width - panel * most, lines = panel * count_groups(matrix) * PANEL;
    packed_panel packed = {(const char *)matrix->panels + panel * panel_bytes(matrix),
                           matrix->scales ? matrix->scales + lines : NULL, matrix->zeros ? matrix->zeros + lines : NULL,
                           words_of(matrix->stored, matrix->group)};
    return (panel_columns){panel * most, left < most ? left : most, width, packed,
                           matrix->bias ? matrix->bias + panel * PANEL : NULL};
}

/* Where a block's rows of a panel's columns of y are written. */
typedef struct {
    char *at;
    ptrdiff_t stride, bytes; /* from row to row, and those of the columns */
} written_rows;

ALWAYS_INLINE void prefetch_written(const written_rows *y, ptrdiff_t first, ptrdiff_t rows) {
    for (ptrdiff_t i = first; i < first + rows; i++)
        for (ptrdiff_t line = 0; line < y->bytes; line += 64)
            __builtin_prefetch(y->at + i * y->stride + line, 1);
}

/* A block of many rows with a panel, to sums [rows][PANEL]. Prefetches into the second cache what is widened next, and
   at the end what is written. */
static void multiply_widened(const packed_matrix *matrix, const row_block *block, const packed_panel *panel,
                             const written_rows *y, float *sums) {
    uint32_t strips[DEPTH * PANEL] __attribute__((aligned(64)));
    ptrdiff_t end = row_words(matrix), step = step_bytes(matrix->stored);
    for (ptrdiff_t first = 0, count; first < end; first += count) {
        count = count_words(panel->group, first, end);
        ptrdiff_t fetched = ((count * step + block->tiles - 1) / block->tiles + 63) / 64 * 64;
        packed_panel rest = panel_from(matrix->stored, panel, first);
        const char *ahead = rest.weights + count * step;
        widen_strips(matrix->stored, &rest, count, strips);
        for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++, ahead += fetched) {
            int rows = tile_rows(block, tile, row);
            for (ptrdiff_t line = 0; line < fetched; line += 64)
                __builtin_prefetch(ahead + line, 0, 2);
            if (first + count == end)
                prefetch_written(y, row, rows);
            for (ptrdiff_t column = 0; column < PANEL; column += STRIP)
                multiply_strips[rows - 1](is_integer(matrix->stored), first == 0,
                                          (const uint32_t *)block->x + row * end + first, end, count,
                                          strips + column * count, rest.scales ? rest.scales + column : NULL,
                                          sums + row * PANEL + column);
            row += rows;
        }
    }
}

/* A block of rows with a panel, to sums [rows][PANEL]. */
static void multiply_block(const product *p, const row_block *block, const packed_panel *panel, const written_rows *y,
                           float *sums) {
    const packed_matrix *matrix = p->matrix;
    ptrdiff_t words = row_words(matrix);
    if (!p->few) {
        multiply_widened(matrix, block, panel, y, sums);
        return;
    }
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int rows = tile_rows(block, tile, row);
        multiply_few_rows[rows - 1](matrix->stored, (const uint32_t *)block->x + row * words, words, panel,
                                    p->totals ? p->totals + (block->first + row) * p->sums_of_row : NULL,
                                    sums + row * PANEL);
        row += rows;
    }
}

/* sums [rows][PANEL] times the scales of rows. */
static void scale_sums(float *sums, ptrdiff_t rows, const float *scales) {
    for (ptrdiff_t i = 0; i < rows; i++, sums += PANEL)
        for (ptrdiff_t c = 0; c < PANEL; c += LANES)
            store(sums + c, load(sums + c) * scales[i]);
}

static void multiply_panel_by_words(const product *p, const row_block *block, ptrdiff_t panel) {
    float sums[WORD_BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    const packed_matrix *matrix = p->matrix;
    panel_columns columns = columns_of(matrix, panel);
    int to_bf16 = !matrix->floats && !matrix->to_float;
    ptrdiff_t size = to_bf16 ? sizeof(bf16) : sizeof(float), before = block->first * columns.width + columns.first;
    written_rows y = {(char *)p->y + before * size, columns.width * size, columns.filled * size};
    multiply_block(p, block, &columns.panel, &y, sums);
    if (is_integer(matrix->stored))
        scale_sums(sums, block->rows, p->scales + block->first);
    finish_sums(matrix->activation, matrix->gated, to_bf16, columns.bias, block->rows, sums, y.at, columns.width,
                columns.filled);
}

#if MULTIPLIES_QUADS || defined(__AVX512BF16__)

/* What tiles of a block prefetch, a part of k at a time of which a panel has so many lines: `next` is the panel that the
   thread will come to behind this one, if it is one of the matrix. */
static prefetching prefetched(const product *p, const row_block *block, const panel_columns *columns, ptrdiff_t next,
                              int lines) {
    if (block->tiles > 1 && next >= 0 && next < p->panels)
        return (prefetching){columns_of(p->matrix, next).panel.weights, (int)((lines + block->tiles - 1) / block->tiles)};
    if (block->tiles == 1 && block->rows >= ROWS_READ_AHEAD)
        return (prefetching){columns->panel.weights + BYTES_AHEAD, lines};
    return (prefetching){NULL, 0};
}

#endif
#if MULTIPLIES_QUADS

int multiplies_quads(void) {
    return 1;
}

static void multiply_quads_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next) {
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    const packed_matrix *matrix = p->matrix;
    ptrdiff_t bytes = row_bytes(matrix), blocks = p->scales_of_row;
    panel_columns columns = columns_of(matrix, panel);
    int to_bf16 = !matrix->floats && !matrix->to_float;
    size_t size = to_bf16 ? sizeof(bf16) : sizeof(float);
    prefetching ahead = prefetched(p, block, &columns, next, BLOCK * PANEL * (int)stored_bits(matrix->stored) / 512);
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int rows = tile_rows(block, tile, row);
        ptrdiff_t before = (block->first + row) * blocks;
        quad_rows x = {(const char *)block->x + row * bytes, p->scales + before, p->totals + before, bytes, blocks};
        multiply_quad_rows[rows - 1](matrix->stored, block->gathered, x, &columns.panel, ahead, sums);
        finish_sums(matrix->activation, matrix->gated, to_bf16, columns.bias, rows, sums,
                    (char *)p->y + (size_t)((block->first + row) * columns.width + columns.first) * size,
                    columns.width, columns.filled);
        ahead.at += blocks * ahead.lines * 64;
        row += rows;
    }
}

#else

int multiplies_quads(void) {
    return 0;
}

#endif
#ifdef __AVX512BF16__

int multiplies_bf16(void) {
    return 1;
}

static void multiply_bf16_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next) {
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    const packed_matrix *matrix = p->matrix;
    ptrdiff_t k = matrix->k;
    panel_columns columns = columns_of(matrix, panel);
    size_t size = matrix->to_float ? sizeof(float) : sizeof(bf16);
    prefetching ahead = prefetched(p, block, &columns, next, PANEL);
    for (ptrdiff_t tile = 0, row = 0; tile < block->tiles; tile++) {
        int rows = tile_rows(block, tile, row);
        multiply_rows[rows - 1](block->gathered, (const bf16 *)block->x + row * k, k,
                                (const bf16 *)(const void *)columns.panel.weights, ahead, sums);
        void *to = (char *)p->y + (size_t)((block->first + row) * columns.width + columns.first) * size;
        finish(matrix->activation, matrix->gated, matrix->to_float, columns.bias, rows, sums, to, columns.width,
               (int)columns.filled);
        ahead.at += (k + CHUNK - 1) / CHUNK * ahead.lines * 64;
        row += rows;
    }
}

#else

int multiplies_bf16(void) {
    return 0;
}

#endif

#if HAS_TILES

static void multiply_tiles_panel(const product *p, const row_block *block, ptrdiff_t panel) {
    float sums[MOST_TILES * SIDE * PANEL] __attribute__((aligned(64)));
    const packed_matrix *matrix = p->matrix;
    panel_columns columns = columns_of(matrix, panel);
    int to_float = matrix->floats || matrix->to_float, integer = is_integer(matrix->stored);
    size_t size = to_float ? sizeof(float) : sizeof(bf16);
    if (integer) {
        ptrdiff_t before = block->first * p->scales_of_row;
        quad_rows x = {block->x, p->scales + before, p->totals + before, row_bytes(matrix), p->scales_of_row};
        (matrix->stored == STORED_INT8 ? multiply_int8_tiles : multiply_int4_tiles)(x, block->rows, &columns.panel, sums);
    } else {
        multiply_bf16_tiles(block->x, row_bytes(matrix), block->rows, columns.panel.weights, sums);
    }
    for (ptrdiff_t tile = 0; tile < block->tiles; tile++) {
        const float *from = sums + tile * SIDE * PANEL;
        int rows = (int)(block->rows < SIDE ? block->rows : SIDE);
        ptrdiff_t first = block->first + first_row(block->rows, tile);
        void *to = (char *)p->y + (size_t)(first * columns.width + columns.first) * size;
        if (integer)
            finish_sums(matrix->activation, matrix->gated, !to_float, columns.bias, rows, from, to, columns.width,
                        columns.filled);
        else
            finish(matrix->activation, matrix->gated, to_float, columns.bias, rows, from, to, columns.width,
                   (int)columns.filled);
    }
}

#endif

static void multiply_panel(const product *p, const row_block *block, ptrdiff_t panel, ptrdiff_t next) {
    (void)next;
#if HAS_TILES
    if (p->by_tiles) {
        multiply_tiles_panel(p, block, panel);
        return;
    }
#endif
    if (multiplies_words(p->matrix))
        multiply_panel_by_words(p, block, panel);
#if MULTIPLIES_QUADS
    else if (is_integer(p->matrix->stored))
        multiply_quads_panel(p, block, panel, next);
#endif
#ifdef __AVX512BF16__
    else
        multiply_bf16_panel(p, block, panel, next);
#endif
}
