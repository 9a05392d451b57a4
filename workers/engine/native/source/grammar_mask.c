/* Logits that grammars rule out, by a bit for each token: 1 where it is allowed. */

#include "lanes.h"
#include "parallel.h"

/* Words of a part; logits that are worth waking threads for. */
enum { BITS = 32, PART = 512, MANY = 1 << 18 };

static const uint32_t BIT[BITS] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,  1u << 8,  1u << 9,  1u << 10,
    1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21,
    1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31,
};

void mask_rows(float *logits, ptrdiff_t vocab, const int64_t *rows, ptrdiff_t count, const uint32_t *masks,
               ptrdiff_t threads);

static void rule_out(float *logits, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++)
        logits[i] = -INFINITY;
}

/* With a load and a whole store, as stores of some lanes are slow on many processors. */
static void mask_word(float *logits, uint32_t word) {
#pragma GCC unroll 8
    for (int i = 0; i < BITS; i += LANES) {
        integers allowed = (((words){0} + word) & load_words(BIT + i)) != 0;
        store(logits + i, choose(allowed, load(logits + i), all(-INFINITY)));
    }
}

static void mask_last_word(float *logits, uint32_t word, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++)
        if (!(word & BIT[i]))
            logits[i] = -INFINITY;
}

/* Words that allow all are not written to; runs of words that allow nothing are filled as one. */
static void mask_words(float *logits, const uint32_t *mask, ptrdiff_t count) {
    for (ptrdiff_t i = 0, end; i < count; i = end) {
        end = i + 1;
        if (mask[i] == 0) {
            while (end < count && mask[end] == 0)
                end++;
            rule_out(logits + i * BITS, (end - i) * BITS);
        } else if (mask[i] != UINT32_MAX)
            mask_word(logits + i * BITS, mask[i]);
    }
}

typedef struct {
    float *logits;
    ptrdiff_t vocab;
    const int64_t *rows;
    const uint32_t *masks;
} masked_rows;

static ptrdiff_t words_of(ptrdiff_t vocab) {
    return (vocab + BITS - 1) / BITS;
}

static ptrdiff_t parts_of(ptrdiff_t vocab) {
    return (words_of(vocab) + PART - 1) / PART;
}

static void mask_range(void *work, ptrdiff_t from, ptrdiff_t to) {
    const masked_rows *all = work;
    ptrdiff_t vocab = all->vocab, whole = vocab / BITS, words = words_of(vocab), parts = parts_of(vocab);
    for (ptrdiff_t item = from; item < to; item++) {
        ptrdiff_t first = item % parts * PART, end = first + PART < whole ? first + PART : whole;
        float *row = all->logits + all->rows[item / parts] * vocab;
        const uint32_t *mask = all->masks + item / parts * words;
        mask_words(row + first * BITS, mask + first, end - first);
        if (first + PART >= words && whole < words)
            mask_last_word(row + whole * BITS, mask[whole], vocab - whole * BITS);
    }
}

/* Row rows[i] of logits [][vocab] by masks [count][vocab / 32, rounded up]. Bits beyond the vocabulary count for
   nothing. */
void mask_rows(float *logits, ptrdiff_t vocab, const int64_t *rows, ptrdiff_t count, const uint32_t *masks,
               ptrdiff_t threads) {
    masked_rows all = {logits, vocab, rows, masks};
    run_ranges(mask_range, &all, count * parts_of(vocab), count * vocab > MANY ? threads : 1);
}
