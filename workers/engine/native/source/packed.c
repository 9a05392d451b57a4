/* Matrices of weights in the order in which matmul.c multiplies with them. */

#include <math.h>
#include <stdatomic.h>

#include "kernels.h"
#include "lanes.h"
#include "matmul.h"
#include "parallel.h"

int find_misfits(const float *w, ptrdiff_t count, ptrdiff_t threads);
void pack_rows(const void *w, ptrdiff_t n, ptrdiff_t k, int stored, int gated, void *panels, ptrdiff_t threads);
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, void *y, ptrdiff_t threads);

/* Which row of w is row `lane` of a panel; n or more for padding. */
static inline ptrdiff_t source_row(ptrdiff_t panel, ptrdiff_t lane, ptrdiff_t n, int gated) {
    if (!gated)
        return panel * PANEL + lane;
    ptrdiff_t row = panel * HALF + lane % HALF;
    if (row >= n / 2)
        return n;
    return lane < HALF ? row : n / 2 + row;
}

/* Numbers of a row that lie beside each other. */
static inline ptrdiff_t count_beside(int stored) {
    return stored == STORED_BF16 ? 2 : stored == STORED_INT8 ? (MULTIPLIES_QUADS ? 4 : 2) : 1;
}

/* The index in a panel of number i of its first row; not of int4. */
static inline ptrdiff_t place_in_panel(ptrdiff_t i, int stored) {
    ptrdiff_t beside = count_beside(stored);
    return i / beside * beside * PANEL + i % beside;
}

/* The same of the word of int4 that number i is in, and by how many bits it is shifted. */
static inline ptrdiff_t word_in_panel(ptrdiff_t i) {
    return i / 8 * PANEL;
}

static inline int shift_in_word(ptrdiff_t i) {
    return (int)(i % 8 / 2 * 4 + i % 2 * 16);
}

ALWAYS_INLINE void pack_panel(int stored, const char *w, ptrdiff_t panel, ptrdiff_t n, ptrdiff_t k, int gated,
                              char *to) {
    size_t size = (size_t)stored_bits(stored) / 8;
    ptrdiff_t beside = count_beside(stored);
    for (ptrdiff_t lane = 0; lane < PANEL; lane++) {
        ptrdiff_t row = source_row(panel, lane, n, gated);
        for (ptrdiff_t i = 0; row < n && i < k; i++)
            if (stored == STORED_INT4)
                ((uint32_t *)(void *)to)[word_in_panel(i) + lane] |= (uint32_t)(uint8_t)w[row * k + i]
                                                                     << shift_in_word(i);
            else if (stored == STORED_INT8)
                to[place_in_panel(i, stored) + lane * beside] = (char)(w[row * k + i] ^ QUAD_OFFSET);
            else
                memcpy(to + (size_t)(place_in_panel(i, stored) + lane * beside) * size,
                       w + (size_t)(row * k + i) * size, size);
    }
}

typedef struct {
    const void *w;
    ptrdiff_t n, k;
    int stored, gated;
    char *panels;
} rows_to_pack;

static void pack_range(void *work, ptrdiff_t first, ptrdiff_t end) {
    const rows_to_pack *all = work;
    for (ptrdiff_t panel = first; panel < end; panel++) {
        char *to = all->panels + panel * PANEL * padded(all->k, all->stored) * stored_bits(all->stored) / 8;
        WITH_STORED(pack_panel, all->stored, all->w, panel, all->n, all->k, all->gated, to)
    }
}

/* w [n][k] in the dtype `stored`, int4 as uint8. k is even for bf16, and panels are zeroed before. */
void pack_rows(const void *w, ptrdiff_t n, ptrdiff_t k, int stored, int gated, void *panels, ptrdiff_t threads) {
    rows_to_pack all = {w, n, k, stored, gated, panels};
    run_ranges(pack_range, &all, (n + PANEL - 1) / PANEL, threads);
}

/* Bit 0 is set where bf16 does not hold x exactly, bit 1 where float16 does not, or this processor cannot widen it. */
static inline int misfits(float x) {
    float size = fabsf(x), small = size * 0x1p24f; /* float16 has whole multiples of 2**-24 below 2**-14 */
    int bits = (int)bits_of_float(x);
    int in_f16 = size < 0x1p-14f ? small == (float)(int)small : size < 65505.0f && (bits & 0x1fff) == 0;
    return ((bits & 0xffff) != 0) | (!in_f16 || !HAS_F16) << 1;
}

typedef struct {
    const float *w;
    ptrdiff_t count;
    atomic_int found;
} numbers;

enum { PART = 1 << 14 };

static void search_parts(void *work, ptrdiff_t part, ptrdiff_t end) {
    numbers *all = work;
    for (; part < end && atomic_load_explicit(&all->found, memory_order_relaxed) != 3; part++) {
        int of_part = 0;
        for (ptrdiff_t i = part * PART; i < (part + 1) * PART && i < all->count; i++)
            of_part |= misfits(all->w[i]);
        atomic_fetch_or_explicit(&all->found, of_part, memory_order_relaxed);
    }
}

/* The `misfits` of all numbers. */
int find_misfits(const float *w, ptrdiff_t count, ptrdiff_t threads) {
    numbers all = {w, count, 0};
    run_ranges(search_parts, &all, (count + PART - 1) / PART, threads);
    return all.found;
}

ALWAYS_INLINE float weight_at(int stored, const char *at) {
    float number;
    uint16_t half;
    if (stored == STORED_INT8)
        return (float)(int8_t)(*at ^ QUAD_OFFSET);
    if (stored == STORED_F32) {
        memcpy(&number, at, sizeof number);
        return number;
    }
    memcpy(&half, at, sizeof half);
    return stored == STORED_BF16 ? float_of_bf16(half) : float_of_f16(half);
}

ALWAYS_INLINE void look_up(int stored, const packed_matrix *matrix, int64_t row, void *y) {
    ptrdiff_t k = matrix->k, size = stored_bits(stored) / 8;
    const char *panel = (const char *)matrix->panels + row / PANEL * panel_bytes(matrix),
        *from = panel + row % PANEL * count_beside(stored) * size;
    for (ptrdiff_t i = 0; i < k; i++) {
        ptrdiff_t line = (row / PANEL * count_groups(matrix) + i / matrix->group) * PANEL + row % PANEL;
        float number;
        if (stored == STORED_INT4) {
            uint32_t word = ((const uint32_t *)(const void *)panel)[word_in_panel(i) + row % PANEL];
            number = (float)((int)(word >> shift_in_word(i) & 15) - matrix->zeros[line]);
        } else
            number = weight_at(stored, from + place_in_panel(i, stored) * size);
        if (is_integer(stored))
            number *= matrix->scales[line];
        if (matrix->floats)
            ((float *)y)[i] = number;
        else
            ((bf16 *)y)[i] = bf16_of_float(number);
    }
}

typedef struct {
    const packed_matrix *matrix;
    const int64_t *rows;
    char *y;
} looked_up_rows;

static void look_up_range(void *work, ptrdiff_t first, ptrdiff_t end) {
    const looked_up_rows *all = work;
    const packed_matrix *matrix = all->matrix;
    ptrdiff_t row_bytes = matrix->k * (ptrdiff_t)(matrix->floats ? sizeof(float) : sizeof(bf16));
    for (ptrdiff_t i = first; i < end; i++) {
        WITH_STORED(look_up, matrix->stored, matrix, all->rows[i], all->y + i * row_bytes)
    }
}

/* y [count, k]: rows of w themselves, as an embedding table gives them. Not for gated matrices. */
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, void *y, ptrdiff_t threads) {
    looked_up_rows all = {matrix, rows, y};
    run_ranges(look_up_range, &all, count, count > 64 ? threads : 1);
}
