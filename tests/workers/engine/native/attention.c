/* A layer of attention by the library's own kernels against plain loops in double: a prompt, then a token, then two at
   once, of a row whose keys and values fill several blocks. Part of the program that kernels.c is. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention_plan.h"

/* Of a head more numbers than four vectors have; of tokens more than those whose keys are cut (SEGMENT) */
enum { HEADS = 6, KV_HEADS = 2, SIZE = 80, TOKENS = 300, BLOCK = 16, BLOCKS = (TOKENS + BLOCK - 1) / BLOCK };
enum { SHARES = 2 };
#define EPS 1e-6f
#define SCALE 0.25f

ptrdiff_t attention_scratch(int32_t mode, int32_t kv_heads, int32_t head_dim, int32_t block_size);
const char *wrong_attention(void);

/* All of which bf16 holds, so that they are the same in each mode. */
static struct {
    float q[TOKENS][HEADS][SIZE], k[TOKENS][KV_HEADS][SIZE], v[TOKENS][KV_HEADS][SIZE];
    float cos[TOKENS][SIZE], sin[TOKENS][SIZE], query_norm[SIZE], key_norm[SIZE];
} given;
enum { NUMBERS = sizeof given / sizeof(float) };
static bf16 in_bf16[NUMBERS];
static float got[TOKENS][HEADS][SIZE]; /* or as many bf16 */
static double keys[TOKENS][KV_HEADS][SIZE];
static uint32_t cache[BLOCKS * KV_HEADS * 2 * BLOCK * SIZE];

static void draw(void) {
    float *numbers = (float *)&given;
    for (int i = 0; i < NUMBERS; i++)
        numbers[i] = (float)(rand() % 255 - 127) / 64.0f;
    for (int token = 0; token < TOKENS; token++)
        for (int i = 0; i < SIZE; i++) {
            double angle = token * pow(0.9, i % (SIZE / 2));
            given.cos[token][i] = (float)cos(angle);
            given.sin[token][i] = (float)(i < SIZE / 2 ? -sin(angle) : sin(angle));
        }
    for (int i = 0; i < NUMBERS; i++) {
        in_bf16[i] = bf16_of_float(numbers[i]);
        numbers[i] = float_of_bf16(in_bf16[i]);
    }
}

/* Where the kernels read what begins with `number`. */
static const void *stored(const float *number, int mode) {
    return mode == PAIRS ? (const void *)(in_bf16 + (number - (const float *)&given)) : number;
}

/* Tokens [from, to) by the kernels. */
static void attend(int32_t from, int32_t to, int mode) {
    int32_t query_start[2] = {0, to - from}, table[BLOCKS], starts[SHARES + 1][3], ahead;
    int64_t slots[TOKENS], partials_at;
    for (int32_t i = 0; i < BLOCKS; i++)
        table[i] = BLOCKS - 1 - i;
    for (int32_t i = from; i < to; i++)
        slots[i - from] = table[i / BLOCK] * BLOCK + i % BLOCK;
    attention_step step = {
        .mode = mode, .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = SIZE, .block_size = BLOCK, .before = TOKENS,
        .num_tokens = to - from, .num_rows = 1, .max_blocks = BLOCKS, .shares = SHARES, .slots = slots,
        .query_start = query_start, .contexts = &to, .tables = table, .starts = starts, .ahead = &ahead,
        .partials_at = &partials_at, .scratch_size = attention_scratch(mode, KV_HEADS, SIZE, BLOCK),
        .query_stride = {HEADS * SIZE, SIZE}, .key_stride = {KV_HEADS * SIZE, SIZE},
        .value_stride = {KV_HEADS * SIZE, SIZE},
    };
    norm_weights query_norm = {.weight = stored(given.query_norm, mode), .eps = EPS},
                 key_norm = {.weight = stored(given.key_norm, mode), .eps = EPS};
    head_rotation rotation = {stored(given.cos[from], mode), stored(given.sin[from], mode), SIZE};
    ptrdiff_t partials = attention_plan(&step);
    float *scratch = malloc((size_t)(SHARES * step.scratch_size + partials) * sizeof(float));
    step.scratch = scratch;
    step.partials = partials ? scratch + SHARES * step.scratch_size : NULL;
    attend_layer(&step, &rotation, cache, stored(given.q[from][0], mode), stored(given.k[from][0], mode),
                 stored(given.v[from][0], mode), (char *)got + from * HEADS * SIZE * number_bytes(mode),
                 &query_norm, &key_norm, SCALE);
    free(scratch);
}

/* A query or key as it attends: normed, turned, and rounded where it is kept in bf16. */
static void prepare(double to[SIZE], const float *x, const float *norm, int token, int is_bf16) {
    double squares = 0;
    for (int i = 0; i < SIZE; i++)
        squares += (double)x[i] * x[i];
    double scale = 1 / sqrt(squares / SIZE + EPS);
    for (int i = 0; i < SIZE; i++) {
        int other = (i + SIZE / 2) % SIZE;
        double along = scale * x[i] * norm[i], across = scale * x[other] * norm[other];
        to[i] = along * given.cos[token][i] + across * given.sin[token][i];
        if (is_bf16)
            to[i] = float_of_bf16(bf16_of_float((float)to[i]));
    }
}

/* Whether what comes of one query is right, but for `tolerance`. */
static int is_right(int token, int head, int mode, double tolerance) {
    double query[SIZE], sums[SIZE] = {0}, total = 0;
    int of = head / (HEADS / KV_HEADS);
    prepare(query, given.q[token][head], given.query_norm, token, mode == PAIRS);
    for (int seen = 0; seen <= token; seen++) {
        double score = 0;
        for (int i = 0; i < SIZE; i++)
            score += query[i] * keys[seen][of][i];
        double weight = exp(SCALE * score);
        total += weight;
        for (int i = 0; i < SIZE; i++)
            sums[i] += weight * given.v[seen][of][i];
    }
    for (int i = 0; i < SIZE; i++) {
        ptrdiff_t place = ((ptrdiff_t)token * HEADS + head) * SIZE + i;
        double number = mode == PAIRS ? float_of_bf16(((bf16 *)got)[place]) : got[0][0][place];
        if (!(fabs(number - sums[i] / total) < tolerance))
            return 0;
    }
    return 1;
}

static int mode_is_right(int mode, double tolerance) {
    memset(cache, 0xff, sizeof cache); /* no numbers */
    attend(0, TOKENS - 3, mode);
    attend(TOKENS - 3, TOKENS - 2, mode);
    attend(TOKENS - 2, TOKENS, mode);
    for (int token = 0; token < TOKENS; token++) {
        for (int head = 0; head < KV_HEADS; head++)
            prepare(keys[token][head], given.k[token][head], given.key_norm, token, mode != FLOATS);
        for (int head = 0; head < HEADS; head++)
            if (!is_right(token, head, mode, tolerance))
                return 0;
    }
    return 1;
}

/* What is wrong, or NULL. */
const char *wrong_attention(void) {
    draw();
    if (!mode_is_right(FLOATS, 3e-5))
        return "attention of floats is wrong";
    if (!mode_is_right(FLOATS_BY_PAIRS, 1e-2))
        return "attention of floats over a cache in bf16 is wrong";
    return mode_is_right(PAIRS, 3e-2) ? NULL : "attention of bf16 is wrong";
}
