/* A block of rows with a panel by AMX (matmul.c), whose registers are tiles of 16 rows of 64 bytes. 16 columns of a panel
   are such tiles as they are stored: 32 numbers of bf16 along k, or 64 of int8. Two tiles of rows of x and two of weights
   give four of sums, which is what the eight registers hold.

   Each sum of bf16 adds its products in the same order however many rows there are: those of even and of odd numbers of a
   tile, and then both to it. vdpbf16ps has another order, so bf16 is multiplied by tiles for any number of rows. Sums of
   integers are exact, and scaled as matmul_quads.h does: there tiles are for many rows alone. */
#ifndef MATMUL_TILES_H
#define MATMUL_TILES_H

enum {
    SIDE = 16, /* rows of a tile, and columns of one of sums */
    ROWS_OF_A_PAIR = 2 * SIDE,
    MOST_TILES = 16, /* of rows, in a block */
    LEAST_BLOCK_ROWS = 64,
    TILED_BLOCK_BYTES = 1 << 20 /* of rows of x, in the second cache */
};

/* How many blocks m rows of so many bytes make. */
static inline ptrdiff_t count_tiled_blocks(ptrdiff_t bytes, ptrdiff_t m) {
    ptrdiff_t rows = TILED_BLOCK_BYTES / bytes / ROWS_OF_A_PAIR * ROWS_OF_A_PAIR;
    ptrdiff_t most = rows < LEAST_BLOCK_ROWS ? LEAST_BLOCK_ROWS : rows < MOST_TILES * SIDE ? rows : MOST_TILES * SIDE;
    return (m + most - 1) / most;
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAS_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

#include "matmul_quads.h"

enum {
    STEP_BYTES = 64,         /* of a row of x, that are multiplied at once */
    LINE_BYTES = PANEL * 4,  /* from a row of weights to the next, and of sums */
    PART_BYTES = 1024,       /* of a row of x, whose weights stay in the first cache while all rows of a block pass */
    LEAST_TILED_ROWS = 8     /* with integers */
};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Asks the system for the registers, which are too large to be kept for every process. Returns whether it has them. */
static int request_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* For this thread: tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. */
static void shape_tiles(ptrdiff_t rows) {
    tile_shapes shapes __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = STEP_BYTES;
        shapes.rows[i] = (uint8_t)(i < 6 && rows < SIDE ? rows : SIDE);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

ALWAYS_INLINE ptrdiff_t count_tiles(ptrdiff_t rows) {
    return (rows + SIDE - 1) / SIDE;
}

/* The last tile has rows of the one before it again, unless there is only one. */
ALWAYS_INLINE ptrdiff_t first_row(ptrdiff_t rows, ptrdiff_t tile) {
    ptrdiff_t last = rows > SIDE ? rows - SIDE : 0;
    return tile * SIDE < last ? tile * SIDE : last;
}

/* One tile of rows of x, or two, from some number along k on. */
typedef struct {
    const char *first, *second; /* the latter NULL for none */
    ptrdiff_t stride;
} rows_of_tiles;

ALWAYS_INLINE rows_of_tiles tiles_of(const char *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t tile) {
    const char *second = tile + 1 < count_tiles(rows) ? x + first_row(rows, tile + 1) * stride : NULL;
    return (rows_of_tiles){x + first_row(rows, tile) * stride, second, stride};
}

/* Adds to sums [1 or 2][SIDE][PANEL], or sets them, what `steps` give. */
ALWAYS_INLINE void add_steps(int integer, int paired, int set, rows_of_tiles x, const char *weights, ptrdiff_t steps,
                             prefetching ahead, void *sums) {
    char *first = sums, *second = first + SIDE * LINE_BYTES;
    __asm__ volatile("" ::: "memory"); /* the instructions' own declarations do not say that they read it */
    if (set) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, first, LINE_BYTES);
        _tile_loadd(1, first + STEP_BYTES, LINE_BYTES);
        if (paired) {
            _tile_loadd(2, second, LINE_BYTES);
            _tile_loadd(3, second + STEP_BYTES, LINE_BYTES);
        }
    }
    for (ptrdiff_t i = 0; i < steps; i++, weights += SIDE * LINE_BYTES) {
        _tile_loadd(6, weights, LINE_BYTES);
        _tile_loadd(4, x.first + i * STEP_BYTES, x.stride);
        for (int line = 0; line < ahead.lines; line++, ahead.at += 64)
            _mm_prefetch(ahead.at, _MM_HINT_T1);
        if (integer)
            _tile_dpbsud(0, 4, 6);
        else
            _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + STEP_BYTES, LINE_BYTES);
        if (integer)
            _tile_dpbsud(1, 4, 7);
        else
            _tile_dpbf16ps(1, 4, 7);
        if (!paired)
            continue;
        _tile_loadd(5, x.second + i * STEP_BYTES, x.stride);
        if (integer) {
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, first, LINE_BYTES);
    _tile_stored(1, first + STEP_BYTES, LINE_BYTES);
    if (paired) {
        _tile_stored(2, second, LINE_BYTES);
        _tile_stored(3, second + STEP_BYTES, LINE_BYTES);
    }
}

#define ADD_STEPS(name, integer)                                                                                       \
    NEVER_INLINE void name(int set, rows_of_tiles x, const char *weights, ptrdiff_t steps, prefetching ahead,          \
                           void *sums) {                                                                               \
        if (x.second)                                                                                                  \
            add_steps(integer, 1, set, x, weights, steps, ahead, sums);                                                \
        else                                                                                                           \
            add_steps(integer, 0, set, x, weights, steps, ahead, sums);                                                \
    }
ADD_STEPS(add_bf16_steps, 0)
ADD_STEPS(add_integer_steps, 1)

/* x [rows][bytes], a multiple of STEP_BYTES. To sums [tiles][SIDE][PANEL]. Prefetches into the second cache what comes
   behind these weights. */
static void multiply_bf16_tiles(const char *x, ptrdiff_t bytes, ptrdiff_t rows, const char *weights, float *sums) {
    ptrdiff_t pairs = (count_tiles(rows) + 1) / 2;
    prefetching ahead = {weights + PART_BYTES * PANEL, (int)((PANEL + pairs - 1) / pairs)};
    for (ptrdiff_t from = 0, count; from < bytes; from += count) {
        count = bytes - from < PART_BYTES ? bytes - from : PART_BYTES;
        for (ptrdiff_t tile = 0; tile < 2 * pairs; tile += 2) {
            add_bf16_steps(from == 0, tiles_of(x + from, bytes, rows, tile), weights + from * PANEL, count / STEP_BYTES,
                           ahead, sums + tile * SIDE * PANEL);
            ahead.at += count / STEP_BYTES * ahead.lines * 64;
        }
    }
}

/* Numbers of 4 bits as 8 bits that are stored in quads. */
ALWAYS_INLINE void unpack_quads(const char *from, ptrdiff_t count, uint32_t *to) {
    for (ptrdiff_t j = 0; j < count; j += 8, from += PANEL * 4, to += 2 * PANEL)
#pragma GCC unroll 2
        for (int v = 0; v < QUAD_VECTORS; v++) {
            words packed = load_words(from + 4 * LANES * v);
            store_words(to + v * LANES, unpacked_quads(packed, 0));
            store_words(to + PANEL + v * LANES, unpacked_quads(packed, 1));
        }
}

/* Adds to sums [rows][PANEL], or sets them, whole ones of a block, of which scales and zero points begin at `line`. */
ALWAYS_INLINE void add_scaled(int stored, int set, const int32_t *whole, ptrdiff_t rows, quad_rows x, ptrdiff_t block,
                              const packed_panel *panel, ptrdiff_t line, float *sums) {
#pragma GCC unroll 2
    for (int v = 0; v < QUAD_VECTORS; v++) {
        words zeros = stored == STORED_INT4 ? load_octets(panel->zeros + line + v * LANES) : (words){0};
        lanes scales = load(panel->scales + line + v * LANES);
        for (ptrdiff_t i = 0; i < rows; i++) {
            float *sum = sums + i * PANEL + v * LANES;
            integers all_of_block = (integers)load_words(whole + i * PANEL + v * LANES) +
                                    less_zeros(stored, x.totals[i * x.blocks + block], zeros);
            lanes scaled = __builtin_convertvector(all_of_block, lanes) * x.scales[i * x.blocks + block];
            store(sum, fused(set ? all(0.0f) : load(sum), scaled, scales));
        }
    }
}

ALWAYS_INLINE quad_rows quads_from(quad_rows x, ptrdiff_t row) {
    ptrdiff_t before = row * x.blocks;
    return (quad_rows){x.numbers + row * x.end, x.scales + before, x.totals + before, x.end, x.blocks};
}

/* Rows of x, of which there are `rows`, with a panel whose groups are in words. To sums [tiles][SIDE][PANEL]. */
ALWAYS_INLINE void multiply_integer_tiles(int stored, quad_rows x, ptrdiff_t rows, const packed_panel *panel,
                                          float *sums) {
    int32_t whole[2 * SIDE * PANEL] __attribute__((aligned(64)));
    uint32_t unpacked[BLOCK / 4 * PANEL] __attribute__((aligned(64)));
    ptrdiff_t group = 2 * panel->group, tiles = count_tiles(rows), high = rows < SIDE ? rows : SIDE;
    const char *weights = panel->weights;
    for (ptrdiff_t from = 0, block = 0, count; from < x.end; from += count, block++) {
        const char *here = weights;
        count = block_numbers(group, from, x.end);
        weights += count * PANEL * stored_bits(stored) / 8;
        if (stored == STORED_INT4) {
            unpack_quads(here, count, unpacked);
            here = (const char *)unpacked;
        }
        for (ptrdiff_t tile = 0; tile < tiles; tile += 2) {
            rows_of_tiles both = tiles_of(x.numbers + from, x.end, rows, tile);
            add_integer_steps(1, both, here, count / STEP_BYTES, (prefetching){NULL, 0}, whole);
            for (ptrdiff_t i = tile; i < tile + 2 && i < tiles; i++)
                add_scaled(stored, from == 0, whole + (i - tile) * SIDE * PANEL, high, quads_from(x, first_row(rows, i)),
                           block, panel, from / group * PANEL, sums + i * SIDE * PANEL);
        }
    }
}

static void multiply_int8_tiles(quad_rows x, ptrdiff_t rows, const packed_panel *panel, float *sums) {
    multiply_integer_tiles(STORED_INT8, x, rows, panel, sums);
}

static void multiply_int4_tiles(quad_rows x, ptrdiff_t rows, const packed_panel *panel, float *sums) {
    multiply_integer_tiles(STORED_INT4, x, rows, panel, sums);
}

#else
#define HAS_TILES 0
#endif
#endif
