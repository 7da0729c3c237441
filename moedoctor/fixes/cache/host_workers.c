/* Workers that compute experts of an expert cache where they are: in host memory, in the cache's own layout.
 *
 * A kernel on the GPU writes a request to pinned memory, the box: a layer, experts, the tokens' weights for them, and
 * the tokens' hidden rows. Its stamp comes last. Every worker polls the stamp, computes its rows of gate and up, waits
 * for the others, computes its rows of down, and answers with the same stamp. Nobody waits for the host's Python.
 *
 * Vectors are GCC's and clang's own: the compiler's flags choose AVX-512, AVX2 or neither. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__BMI2__) || defined(__AVX2__)
#include <immintrin.h>
#endif

enum { SIZE = 8192, LANES = 8, COLUMNS = SIZE / LANES }; /* of a block, as moedoctor.fixes.cache.packed */
enum { MOST_TOKENS = 8, MOST_EXPERTS = 64, MOST_WORKERS = 64 };
enum { TILE_INPUTS = 16, TILE_ROWS = 64, TILE_BYTES = 512, MOST_ROWS = 256 }; /* of MARLIN_FP4 */
enum format { PACKED, BFLOAT16, E4M3, MARLIN_FP4 };
enum fault { SOUND, ENDS, HANGS };

/* Vectors of the width that the CPU has: wider ones would be taken apart element by element. */
#if defined(__AVX512BW__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef uint8_t bytes __attribute__((vector_size(WIDTH)));
typedef uint16_t words __attribute__((vector_size(WIDTH)));
typedef uint32_t ints __attribute__((vector_size(WIDTH)));
typedef float floats __attribute__((vector_size(WIDTH)));
typedef uint8_t half_bytes __attribute__((vector_size(WIDTH / 2)));
typedef uint8_t quarter_bytes __attribute__((vector_size(WIDTH / 4)));
typedef uint16_t half_words __attribute__((vector_size(WIDTH / 2)));

/* One tensor [E, rows, cols] of a layer. */
struct matrix {
    const uint8_t *data;
    const float *scales;  /* [E, ...], or NULL; of MARLIN_FP4 bytes [E, cols / 16, rows] */
    const float *factors; /* [E], MARLIN_FP4 alone */
    int64_t stride;       /* bytes from one expert to the next */
    int64_t rows, cols;
    int64_t scale_stride, scale_rows, scale_cols; /* scales of an expert; rows and columns that share one */
    int64_t block_bytes, listed;                  /* PACKED: bytes of a block, word of its tail at which the list begins */
    int64_t format;
};

struct layer {
    struct matrix up, down; /* gate and up [E, 2I, H], down [E, H, I] */
};

/* The GPU writes all of it but `answers` and what follows `hidden`: sums float [MOST_TOKENS][H]. */
struct box {
    _Alignas(64) _Atomic int64_t request; /* the stamp, written last */
    _Alignas(64) int32_t layer;
    int32_t experts, tokens;
    _Alignas(64) _Atomic int64_t answers[MOST_WORKERS]; /* the stamp of what each worker has computed */
    int32_t ids[MOST_EXPERTS];
    float weights[MOST_EXPERTS][MOST_TOKENS]; /* 0: the token does not use the expert */
    uint16_t hidden[];                        /* bfloat16 [MOST_TOKENS][H] */
};

struct crew {
    struct box *box;
    const struct layer *layers;
    int64_t layer_count, experts, hidden, inner, workers, late_ticks;
    float *sums, *between; /* [MOST_TOKENS][H] in the box; [MOST_EXPERTS][MOST_TOKENS][I] between both products */
    _Atomic int stop, sleepers, wakes, faults[MOST_WORKERS], ended[MOST_WORKERS];
    int cores[MOST_WORKERS];
    pthread_t threads[MOST_WORKERS], watcher;
    struct {
        _Alignas(64) _Atomic int64_t stamp;
    } halves[MOST_WORKERS]; /* the request whose first product each worker has computed */
};

struct worker {
    struct crew *crew;
    int64_t number;
};

static const int64_t TICK_NS = 20 * 1000 * 1000, SPIN_NS = 10 * 1000 * 1000, NAP_NS = 500 * 1000;
static const int EXIT_CODE = 71;

/* --- Weights to bfloat16. ------------------------------------------------------------------------------------ */

static inline uint64_t load8(const void *from)
{
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

/* Put the lowest bits of `bits` at the places of `mask`, in order. */
static inline uint64_t spread(uint64_t bits, uint64_t mask)
{
#ifdef __BMI2__
    return _pdep_u64(bits, mask);
#else
    uint64_t result = 0;
    for (; mask; mask &= mask - 1, bits >>= 1)
        result |= (bits & 1) ? mask & -mask : 0;
    return result;
#endif
}

/* The entries of a table [16] that `index` names. */
static inline bytes look_up(bytes table, bytes index)
{
#if defined(__AVX512BW__)
    return (bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
    return (bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#else
    uint8_t entries[WIDTH], indices[WIDTH];
    memcpy(entries, &table, WIDTH);
    memcpy(indices, &index, WIDTH);
    for (int at = 0; at < WIDTH; at++)
        indices[at] = entries[indices[at]];
    memcpy(&index, indices, WIDTH);
    return index;
#endif
}

/* Write the index of every exponent of a block of moedoctor.fixes.cache.packed to `result` [SIZE]: 0 to 7 are codes of
 * three bits, 8 to 10 of two. What is read is fetched for the next block too. */
static void find_indices(const uint8_t *block, const struct matrix *matrix, uint8_t *result)
{
    const uint8_t *first = block + SIZE, *second = first + COLUMNS;
    const uint32_t *codes = (const uint32_t *)(second + COLUMNS) + 1;
    const int64_t groups = (matrix->listed - 1) / 3, ahead = matrix->block_bytes;
    uint32_t planes[3][SIZE / 32 + 4];
    for (int64_t group = 0; group < groups; group++) {
        planes[0][group] = codes[3 * group];
        planes[1][group] = codes[3 * group + 1];
        planes[2][group] = codes[3 * group + 2];
    }
    for (int bit = 0; bit < 3; bit++)
        memset(planes[bit] + groups, 0, 16); /* reads below go past the last code */
    /* Bits of the codes of three, by column and lane. Which code it is, is how many are before it. */
    uint64_t bits[3][COLUMNS / 8] __attribute__((aligned(64)));
    int64_t number = 0;
    for (int column = 0; column < COLUMNS; column += 8) {
        if (column % 16 == 0 && SIZE + 4 * column < ahead) /* one at a time: a core waits if it has asked for many */
            __builtin_prefetch(block + SIZE + 4 * column + ahead);
        const uint64_t escaped = load8(first + column) & load8(second + column);
        const int count = __builtin_popcountll(escaped), shift = number & 7;
        for (int bit = 0; bit < 3; bit++) {
            const uint8_t *at = (const uint8_t *)planes[bit] + (number >> 3);
            uint64_t code = load8(at) >> shift;
            if (shift + count > 64)
                code |= (uint64_t)at[8] << (64 - shift);
            bits[bit][column / 8] = spread(code, escaped);
        }
        number += count;
    }
    for (int column = 0; column < COLUMNS; column += WIDTH) {
        bytes bit[4], pairs[4], one, two;
        for (int at = 0; at < 3; at++)
            memcpy(&bit[at], (const uint8_t *)bits[at] + column, WIDTH);
        memcpy(&one, first + column, WIDTH);
        memcpy(&two, second + column, WIDTH);
        bit[3] = ~(one & two);
        bit[0] |= one & bit[3];
        bit[1] |= two & bit[3];
        /* Indices of even and odd lanes, two bits each; then indices of lanes L and L + 4 in the halves of a byte. */
        const bytes even = (bit[0] & 0x55) | (bytes)((words)(bit[1] & 0x55) << 1);
        const bytes odd = ((bytes)((words)bit[0] >> 1) & 0x55) | (bit[1] & 0xAA);
        const bytes high_even = (bit[2] & 0x55) | (bytes)((words)(bit[3] & 0x55) << 1);
        const bytes high_odd = ((bytes)((words)bit[2] >> 1) & 0x55) | (bit[3] & 0xAA);
        pairs[0] = (even & 0x33) | (bytes)((words)(high_even & 0x33) << 2);
        pairs[1] = (odd & 0x33) | (bytes)((words)(high_odd & 0x33) << 2);
        pairs[2] = ((bytes)((words)even >> 2) & 0x33) | (high_even & 0xCC);
        pairs[3] = ((bytes)((words)odd >> 2) & 0x33) | (high_odd & 0xCC);
        for (int lane = 0; lane < LANES / 2; lane++) {
            const bytes low = pairs[lane] & 0x0F, high = (bytes)((words)pairs[lane] >> 4) & 0x0F;
            memcpy(result + lane * COLUMNS + column, &low, WIDTH);
            memcpy(result + (lane + LANES / 2) * COLUMNS + column, &high, WIDTH);
        }
    }
}

/* Interleave elements of both: low halves of every 16 bytes to `result[0]`, high halves to `result[1]`. */
static inline void interleave_bytes(bytes even, bytes odd, words *result)
{
#if defined(__AVX512BW__)
    result[0] = (words)_mm512_unpacklo_epi8((__m512i)even, (__m512i)odd);
    result[1] = (words)_mm512_unpackhi_epi8((__m512i)even, (__m512i)odd);
#elif defined(__AVX2__)
    result[0] = (words)_mm256_unpacklo_epi8((__m256i)even, (__m256i)odd);
    result[1] = (words)_mm256_unpackhi_epi8((__m256i)even, (__m256i)odd);
#else
    for (int at = 0; at < WIDTH / 2; at++) {
        result[0][at] = (uint16_t)(odd[at] << 8 | even[at]);
        result[1][at] = (uint16_t)(odd[at + WIDTH / 2] << 8 | even[at + WIDTH / 2]);
    }
#endif
}

/* Widen bfloat16 to float: low halves of every 16 bytes to `result[0]`, high halves to `result[1]`. */
static inline void widen_words(words from, floats *result)
{
#if defined(__AVX512BW__)
    result[0] = (floats)_mm512_unpacklo_epi16(_mm512_setzero_si512(), (__m512i)from);
    result[1] = (floats)_mm512_unpackhi_epi16(_mm512_setzero_si512(), (__m512i)from);
#elif defined(__AVX2__)
    result[0] = (floats)_mm256_unpacklo_epi16(_mm256_setzero_si256(), (__m256i)from);
    result[1] = (floats)_mm256_unpackhi_epi16(_mm256_setzero_si256(), (__m256i)from);
#else
    ints low, high;
    for (int at = 0; at < WIDTH / 4; at++) {
        low[at] = (uint32_t)from[at] << 16;
        high[at] = (uint32_t)from[at + WIDTH / 4] << 16;
    }
    result[0] = (floats)low, result[1] = (floats)high;
#endif
}

/* Convert E4M3 codes to bfloat16, which holds each of them. */
static inline words convert_e4m3(words code)
{
    const words magnitude = code & 0x7F;
    words word = (magnitude << 4) + (120 << 7);
    const words three = (magnitude & 3) << 5, tiny = (words)(magnitude < 8);
    /* Below 2^-6: m * 2^-9, for m of 0 to 7. */
    words small = three + 0x3C00;
    small = ((words)(magnitude < 4) & (((magnitude & 1) << 6) + 0x3B80)) | (~(words)(magnitude < 4) & small);
    small = ((words)(magnitude < 2) & (magnitude * 0x3B00)) | (~(words)(magnitude < 2) & small);
    word = (tiny & small) | (~tiny & word);
    const words nan = (words)(magnitude == 0x7F);
    return (nan & 0x7FC0) | (~nan & word) | (code & 0x80) << 8;
}

/* Return words of bfloat16 whose first is element `from` of an expert; `buffer` has room for SIZE + WIDTH. */
static const uint16_t *fetch(const struct matrix *matrix, const uint8_t *data, int64_t from, int64_t end, uint16_t *buffer)
{
    if (matrix->format == BFLOAT16)
        return (const uint16_t *)data + from;
    for (int64_t at = from; at < end; at += WIDTH / 2) {
        half_bytes codes = {0};
        if (end - at < WIDTH / 2)
            memcpy(&codes, data + at, end - at);
        else
            memcpy(&codes, data + at, WIDTH / 2);
        const words word = convert_e4m3(__builtin_convertvector(codes, words));
        memcpy(buffer + (at - from), &word, WIDTH);
    }
    return buffer;
}

/* --- Products. ------------------------------------------------------------------------------------------------ */

static inline floats widen(const uint16_t *from)
{
    half_words part;
    memcpy(&part, from, WIDTH / 2);
    return (floats)(__builtin_convertvector(part, ints) << 16);
}

static inline floats load(const float *from)
{
    floats value;
    memcpy(&value, from, WIDTH);
    return value;
}

static inline float make_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float add_up(floats sums)
{
    float total = 0;
    for (int lane = 0; lane < WIDTH / 4; lane++)
        total += sums[lane];
    return total;
}

/* Where input `at` of a row stands: for packed weights in the order in which `widen_words` returns them. */
static inline int64_t find_input(const struct matrix *matrix, int64_t at)
{
    if (matrix->format != PACKED)
        return at;
    return at - at % WIDTH + at % 16 / 4 * (WIDTH / 4) + at % WIDTH / 16 * 4 + at % 4;
}

static float multiply_row(const uint16_t *row, const float *x, int64_t count)
{
    enum { STEP = WIDTH / 4 };
    floats sums[4] = {{0}};
    int64_t at = 0;
    for (; at + 4 * STEP <= count; at += 4 * STEP)
        for (int part = 0; part < 4; part++)
            sums[part] += widen(row + at + part * STEP) * load(x + at + part * STEP);
    float total = add_up((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; at < count; at++)
        total += make_float((uint32_t)row[at] << 16) * x[at];
    return total;
}

/* y [count][stride] += elements `from` to `end` of an expert, all of one packed block, times rows of `count` inputs. */
static inline __attribute__((always_inline)) void multiply_block(const struct matrix *matrix, const uint8_t *block,
                                                                 const uint8_t *indices, int64_t from, int64_t end,
                                                                 const float *const *x, const int count, float *y, int64_t stride)
{
    enum { STEP = WIDTH / 4 };
    const uint32_t *tail = (const uint32_t *)(block + SIZE + 2 * COLUMNS);
    const int64_t cols = matrix->cols, begin = from / cols, start = from - from % SIZE;
    const int top = tail[0] & 0xFF, above = tail[0] >> 8 & 0xFF;
    /* By a weight's index: seven bits of its exponent, and the eighth. */
    bytes seven, eighth;
    for (int at = 0; at < WIDTH; at++) {
        const int index = at % 16;
        const int code = index >= 8 ? index - 8 + above : index + (index >= above ? 3 : 0);
        seven[at] = (uint8_t)(top - code) >> 1;
        eighth[at] = (uint8_t)(top - code) << 7;
    }
    for (int64_t at = from; at < end;) {
        const int64_t row = at / cols, last = end < (row + 1) * cols ? end : (row + 1) * cols;
        floats sums[2][4] = {{{0}}};
        for (; at < last; at += WIDTH) {
            bytes index, part;
            words pairs[2];
            memcpy(&index, indices + at % SIZE, WIDTH);
            memcpy(&part, block + at % SIZE, WIDTH);
            __builtin_prefetch(block + at % SIZE + matrix->block_bytes);
            interleave_bytes(look_up(eighth, index) | (part & 0x7F), look_up(seven, index) | (part & 0x80), pairs);
            for (int half = 0; half < 2; half++) {
                floats weights[2];
                widen_words(pairs[half], weights);
                for (int each = 0; each < count; each++)
                    for (int side = 0; side < 2; side++)
                        sums[each][2 * half + side] += weights[side] * load(x[each] + at % cols + (2 * half + side) * STEP);
            }
        }
        for (int each = 0; each < count; each++)
            y[each * stride + row - begin] += add_up((sums[each][0] + sums[each][1]) + (sums[each][2] + sums[each][3]));
    }
    /* What has no code was taken for another exponent. */
    const int64_t tail_words = (matrix->block_bytes - SIZE - 2 * COLUMNS) / 4;
    for (int64_t entry = matrix->listed; entry < tail_words && (tail[entry] & 0xFFFF) < SIZE; entry++) {
        const int64_t place = tail[entry] & 0xFFFF, at = start + place;
        if (at < from || at >= end)
            continue;
        const uint32_t rest = (block[place] & 0x80) << 24 | (block[place] & 0x7F) << 16;
        const float right = make_float(rest | (tail[entry] >> 16) << 23);
        const float wrong = make_float(rest | seven[indices[place]] << 24 | eighth[indices[place]] << 16);
        for (int each = 0; each < count; each++)
            y[each * stride + at / cols - begin] += (right - wrong) * x[each][find_input(matrix, at % cols)];
    }
}

/* --- NVFP4 in MARLIN's layout. ---------------------------------------------------------------------------------
 *
 * Tiles of 16 inputs and 64 rows, [cols / 16][rows / 64] of them, have 128 words of eight E2M1 codes. Code q, 0 the
 * lowest, of word 16 * c + 4 * t + j is that of row 16 * j + 8 * (q / 2 % 2) + c for input 8 * (q % 2) + 2 * t + q / 4.
 * Each of these rows has a scale, the upper byte of a float16 without its sign: number 8 * c + 4 * (j / 2) +
 * 2 * (q / 2 % 2) + j % 2 of the tile's 64. The expert's factor is 2^126 times too large.
 *
 * Below, a vector has codes of one c and one q / 2 % 2, side by side: those of q / 4 = 0 and 1, of j = 0 and 1 (or 2
 * and 3), and of several t. */

/* Return x[index] of eight x for each lane. */
static inline floats pick(const float *x, ints index)
{
#if defined(__AVX512BW__)
    return (floats)_mm512_permutexvar_ps((__m512i)index, _mm512_broadcast_f32x8(_mm256_loadu_ps(x)));
#elif defined(__AVX2__)
    return (floats)_mm256_permutevar8x32_ps(_mm256_loadu_ps(x), (__m256i)index);
#else
    floats values;
    for (int lane = 0; lane < WIDTH / 4; lane++)
        values[lane] = x[index[lane]];
    return values;
#endif
}

/* Return four floats, again and again. */
static inline floats repeat_four(const float *from)
{
#if defined(__AVX512BW__)
    return (floats)_mm512_broadcast_f32x4(_mm_loadu_ps(from));
#elif defined(__AVX2__)
    return (floats)_mm256_broadcast_ps((const __m128 *)from);
#else
    return load(from);
#endif
}

/* Widen 16 words of codes, or a part of them: `values` by row + 8, then by j / 2, then by input + 8. `low` and `high` are
 * the bytes of each code's bfloat16. */
static inline void widen_e2m1(bytes codes, bytes low, bytes high, floats values[2][2][2])
{
#pragma GCC unroll 2
    for (int right = 0; right < 2; right++) {
        const bytes index = (right ? (bytes)((words)codes >> 4) : codes) & 0x0F;
        words both[2];
        interleave_bytes(look_up(low, index), look_up(high, index), both);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            values[0][half][right] = (floats)((ints)both[half] << 16);
            values[1][half][right] = (floats)((ints)both[half] & 0xFFFF0000);
        }
    }
}

/* y [count][stride] = `rows` rows of an expert, from `first` on, times rows of `count` inputs. Up to MOST_ROWS, because
 * what is side by side in memory should be read at once. */
static inline __attribute__((always_inline)) void multiply_tiles(const struct matrix *matrix, int64_t expert, int64_t first, int64_t rows,
                                                                 const float *const *x, const int count, float *y, int64_t stride)
{
    enum { STEP = WIDTH / 4, PARTS = 16 / STEP, AHEAD = 2 };
    const int64_t row_bytes = matrix->rows / TILE_ROWS * TILE_BYTES;
    const uint8_t *data = matrix->data + expert * matrix->stride + first / TILE_ROWS * TILE_BYTES;
    const uint8_t *codes = (const uint8_t *)matrix->scales + expert * matrix->scale_stride + first;
    static const uint8_t lows[8] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0}; /* 0, .5, 1, 1.5, 2, 3, 4, 6 */
    static const uint8_t highs[8] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40};
    floats sums[2][MOST_ROWS / 8][2][2]; /* of an input, by tile and c, row + 8 and j / 2 */
    ints places[PARTS];
    bytes low, high;
    memset(sums, 0, sizeof sums);
    for (int at = 0; at < WIDTH; at++) {
        low[at] = lows[at % 8];
        high[at] = highs[at % 8] | (at % 16 / 8 << 7);
    }
    for (int lane = 0; lane < 16; lane++)
        places[lane / STEP][lane % STEP] = lane / 4 * 2 + lane % 2;
    for (int64_t at = 0; at < matrix->cols; at += TILE_INPUTS, data += row_bytes, codes += matrix->rows) {
        float scales[MOST_ROWS][2]; /* twice each */
        floats inputs[2][2][PARTS];
        for (int64_t line = 0; line < rows; line += 8)
            __builtin_prefetch(data + AHEAD * row_bytes + line * 8);
        for (int64_t line = 0; line < rows; line += 64)
            __builtin_prefetch(codes + AHEAD * matrix->rows + line);
        for (int64_t row = 0; row < rows; row++)
            scales[row][0] = scales[row][1] = make_float((uint32_t)codes[row] << 20) * 0x1p112f;
        for (int each = 0; each < count; each++)
            for (int right = 0; right < 2; right++)
                for (int part = 0; part < PARTS; part++)
                    inputs[each][right][part] = pick(x[each] + at + 8 * right, places[part]);
        for (int64_t c = 0; c < rows / 8; c++) {
            floats products[2][2][2] = {{{{0}}}};
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                floats values[2][2][2];
                bytes word;
                memcpy(&word, data + c * 64 + part * WIDTH, WIDTH);
                widen_e2m1(word, low, high, values);
#pragma GCC unroll 16
                for (int at = 0; at < 8 * count; at++)
                    products[at / 8][at / 4 % 2][at / 2 % 2] += values[at / 4 % 2][at / 2 % 2][at % 2] * inputs[at / 8][at % 2][part];
            }
#pragma GCC unroll 8
            for (int at = 0; at < 4 * count; at++)
                sums[at / 4][c][at / 2 % 2][at % 2] += products[at / 4][at / 2 % 2][at % 2] * repeat_four(scales[8 * c + at % 2 * 4 + at / 2 % 2 * 2]);
        }
    }
    const float factor = matrix->factors[expert] * 0x1p-126f;
    for (int each = 0; each < count; each++)
        for (int64_t row = 0; row < rows; row++) {
            const floats part = sums[each][row / TILE_ROWS * 8 + row % 8][row / 8 % 2][row / 32 % 2];
            float total = 0;
            for (int64_t lane = row / 16 % 2 * 2; lane < STEP; lane += 4)
                total += part[lane] + part[lane + 1];
            y[each * stride + row] = factor * total;
        }
}

/* y [tokens][stride] = rows `first` to `last` of an expert times the rows `tokens` of x [MOST_TOKENS][cols]. */
static void multiply(const struct matrix *matrix, int64_t expert, int64_t first, int64_t last, const float *x,
                     const int *tokens, int count, float *y, int64_t stride)
{
    if (matrix->format == MARLIN_FP4) {
        for (int64_t row = first; row < last; row += MOST_ROWS)
            for (int each = 0; each < count; each += 2) {
                const float *pair[2] = {x + tokens[each] * matrix->cols, x + tokens[each + (each + 1 < count)] * matrix->cols};
                const int64_t rows = last - row < MOST_ROWS ? last - row : MOST_ROWS;
                float *out = y + each * stride + row - first;
                if (each + 1 < count)
                    multiply_tiles(matrix, expert, row, rows, pair, 2, out, stride);
                else
                    multiply_tiles(matrix, expert, row, rows, pair, 1, out, stride);
            }
        return;
    }
    uint16_t buffer[SIZE + WIDTH] __attribute__((aligned(64)));
    const uint8_t *data = matrix->data + expert * matrix->stride;
    const float *scales = matrix->scales ? matrix->scales + expert * matrix->scale_stride : NULL;
    const int64_t cols = matrix->cols, scale_count = (cols + matrix->scale_cols - 1) / matrix->scale_cols;
    for (int each = 0; each < count; each++)
        memset(y + each * stride, 0, (last - first) * sizeof(float));
    for (int64_t at = first * cols; at < last * cols;) {
        const int64_t from = at, block_end = (at / SIZE + 1) * SIZE;
        const int64_t end = block_end < last * cols ? block_end : last * cols;
        if (matrix->format == PACKED) {
            const uint8_t *block = data + from / SIZE * matrix->block_bytes;
            uint8_t *indices = (uint8_t *)buffer;
            find_indices(block, matrix, indices);
            for (int each = 0; each < count; each += 2) {
                const float *pair[2] = {x + tokens[each] * cols, x + tokens[each + (each + 1 < count)] * cols};
                float *out = y + each * stride + from / cols - first;
                if (each + 1 < count)
                    multiply_block(matrix, block, indices, from, end, pair, 2, out, stride);
                else
                    multiply_block(matrix, block, indices, from, end, pair, 1, out, stride);
            }
            at = end;
            continue;
        }
        const uint16_t *part = fetch(matrix, data, from, end, buffer);
        while (at < end) {
            const int64_t row = at / cols, col = at % cols;
            const int64_t scaled = matrix->scale_cols - col % matrix->scale_cols;
            int64_t length = end - at < cols - col ? end - at : cols - col;
            length = length < scaled ? length : scaled;
            const float scale = scales ? scales[row / matrix->scale_rows * scale_count + col / matrix->scale_cols] : 1;
            for (int each = 0; each < count; each++)
                y[each * stride + row - first] +=
                    scale * multiply_row(part + (at - from), x + tokens[each] * cols + col, length);
            at += length;
        }
    }
}

/* The share of `worker` in `total` rows, in whole blocks if a block is a number of rows, and in whole tiles. */
static int64_t divide(int64_t total, const struct matrix *matrix, int64_t worker, int64_t workers)
{
    const int64_t step = matrix->format == MARLIN_FP4 ? TILE_ROWS : SIZE % matrix->cols ? 1 : SIZE / matrix->cols;
    return worker == workers ? total : total / step * worker / workers * step;
}

static int find_tokens(const struct box *box, int64_t place, int *tokens)
{
    int count = 0;
    for (int token = 0; token < box->tokens; token++)
        if (box->weights[place][token] != 0)
            tokens[count++] = token;
    return count;
}

/* between [expert][token][I] = weight * silu(gate) * up, the rows of one worker. */
static void compute_first(struct crew *crew, int64_t number, const float *x, float *y)
{
    const struct box *box = crew->box;
    const struct matrix *matrix = &crew->layers[box->layer].up, *down = &crew->layers[box->layer].down;
    const int64_t inner = crew->inner, total = box->experts * inner;
    const int64_t low = divide(total, matrix, number, crew->workers);
    const int64_t high = divide(total, matrix, number + 1, crew->workers);
    float *gate = y, *up = y + MOST_TOKENS * inner;
    for (int64_t place = low / inner; place < box->experts && place * inner < high; place++) {
        const int64_t first = low > place * inner ? low - place * inner : 0;
        const int64_t last = high < (place + 1) * inner ? high - place * inner : inner;
        int tokens[MOST_TOKENS];
        const int count = find_tokens(box, place, tokens);
        multiply(matrix, box->ids[place], first, last, x, tokens, count, gate, inner);
        multiply(matrix, box->ids[place], inner + first, inner + last, x, tokens, count, up, inner);
        for (int each = 0; each < count; each++) {
            float *out = crew->between + (place * MOST_TOKENS + tokens[each]) * inner;
            const float weight = box->weights[place][tokens[each]];
            for (int64_t row = 0; row < last - first; row++) {
                const float value = gate[each * inner + row];
                out[find_input(down, first + row)] = weight * value / (1 + expf(-value)) * up[each * inner + row];
            }
        }
    }
}

/* sums [token][H] = what all experts add to it, the rows of one worker. */
static void compute_second(struct crew *crew, int64_t number, float *y)
{
    const struct box *box = crew->box;
    const struct matrix *matrix = &crew->layers[box->layer].down;
    const int64_t first = divide(crew->hidden, matrix, number, crew->workers);
    const int64_t last = divide(crew->hidden, matrix, number + 1, crew->workers);
    for (int token = 0; token < box->tokens; token++)
        memset(crew->sums + token * crew->hidden + first, 0, (last - first) * sizeof(float));
    for (int64_t place = 0; place < box->experts; place++) {
        int tokens[MOST_TOKENS];
        const int count = find_tokens(box, place, tokens);
        const float *x = crew->between + place * MOST_TOKENS * crew->inner;
        multiply(matrix, box->ids[place], first, last, x, tokens, count, y, crew->hidden);
        for (int each = 0; each < count; each++)
            for (int64_t row = first; row < last; row++)
                crew->sums[tokens[each] * crew->hidden + row] += y[each * crew->hidden + row - first];
    }
}

/* --- Workers. ------------------------------------------------------------------------------------------------- */

static int64_t read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void nap(int64_t nanoseconds)
{
    const struct timespec time = {0, nanoseconds};
    nanosleep(&time, NULL);
}

/* Wait a moment; at times, when `spins` is 0 again, let another thread have the core. */
static inline void relax(int *spins)
{
    *spins = (*spins + 1) % 1024;
    if (*spins == 0)
        sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void stop_process(const struct crew *crew, int64_t number, const char *problem)
{
    dprintf(2, "moedoctor: expert_cache: CPU worker %d of %d (core %d) %s; the engine stops, because layer %d lacks its part\n",
            (int)number, (int)crew->workers, crew->cores[number], problem, (int)crew->box->layer);
    _exit(EXIT_CODE);
}

/* Wait for a request other than `done`; return its stamp, or `done` if the crew stops.
 *
 * After a while without requests worker 0 looks twice a millisecond, and the others sleep until it wakes them. */
static int64_t await_request(struct crew *crew, int64_t number, int64_t done)
{
    const int64_t begin = read_clock();
    int spins = 0, sleeps = 0;
    while (!atomic_load(&crew->stop)) {
        const int64_t stamp = atomic_load(&crew->box->request);
        if (stamp != done) {
            if (number == 0 && atomic_load(&crew->sleepers)) {
                atomic_fetch_add(&crew->wakes, 1);
                syscall(SYS_futex, &crew->wakes, FUTEX_WAKE_PRIVATE, MOST_WORKERS, NULL, NULL, 0);
            }
            return stamp;
        }
        relax(&spins);
        sleeps = sleeps || (spins == 0 && read_clock() - begin > SPIN_NS);
        if (sleeps && number == 0) {
            nap(NAP_NS);
        } else if (sleeps) {
            const struct timespec most = {0, 200 * 1000 * 1000};
            atomic_fetch_add(&crew->sleepers, 1);
            const int seen = atomic_load(&crew->wakes);
            if (atomic_load(&crew->box->request) == done)
                syscall(SYS_futex, &crew->wakes, FUTEX_WAIT_PRIVATE, seen, &most, NULL, 0);
            atomic_fetch_sub(&crew->sleepers, 1);
        }
    }
    return done;
}

static void check_request(const struct crew *crew, int64_t number)
{
    const struct box *box = crew->box;
    int right = box->layer >= 0 && box->layer < crew->layer_count && box->experts > 0 &&
                box->experts <= MOST_EXPERTS && box->tokens > 0 && box->tokens <= MOST_TOKENS;
    for (int place = 0; right && place < box->experts; place++)
        right = box->ids[place] >= 0 && box->ids[place] < crew->experts;
    if (!right)
        stop_process(crew, number, "got a request that is damaged");
}

static void end_worker(void *ended)
{
    atomic_store((_Atomic int *)ended, 1);
}

static void *work(void *given)
{
    struct worker self = *(struct worker *)given;
    struct crew *crew = self.crew;
    free(given);
    pthread_cleanup_push(end_worker, &crew->ended[self.number]);
    if (crew->cores[self.number] >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(crew->cores[self.number], &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
    const int64_t hidden = crew->hidden, widest = hidden > 2 * crew->inner ? hidden : 2 * crew->inner;
    float *x = malloc(MOST_TOKENS * hidden * sizeof(float)), *y = malloc(MOST_TOKENS * widest * sizeof(float));
    for (int64_t done = 0; x && y;) {
        const int64_t stamp = await_request(crew, self.number, done);
        if (stamp == done)
            break;
        if (crew->faults[self.number] == ENDS)
            break;
        while (crew->faults[self.number] == HANGS && !atomic_load(&crew->stop))
            nap(NAP_NS);
        check_request(crew, self.number);
        const struct matrix *up = &crew->layers[crew->box->layer].up;
        for (int64_t at = 0; at < crew->box->tokens * hidden; at++)
            x[at - at % hidden + find_input(up, at % hidden)] = make_float((uint32_t)crew->box->hidden[at] << 16);
        compute_first(crew, self.number, x, y);
        atomic_store(&crew->halves[self.number].stamp, stamp);
        for (int64_t other = 0; other < crew->workers; other++)
            for (int spins = 0; atomic_load(&crew->halves[other].stamp) != stamp && !atomic_load(&crew->stop);)
                relax(&spins);
        if (atomic_load(&crew->stop))
            break; /* others may have stopped in between */
        compute_second(crew, self.number, y);
        atomic_store(&crew->box->answers[self.number], stamp);
        done = stamp;
    }
    free(x);
    free(y);
    pthread_cleanup_pop(1);
    return NULL;
}

/* End the process if a worker has ended, or is late: by ticks, so that a process that was stopped is not late. */
static void *watch(void *given)
{
    struct crew *crew = given;
    int64_t last = 0, ticks = 0;
    while (!atomic_load(&crew->stop)) {
        nap(TICK_NS);
        const int64_t stamp = atomic_load(&crew->box->request);
        int64_t late = -1;
        for (int64_t number = 0; number < crew->workers && !atomic_load(&crew->stop); number++) {
            if (atomic_load(&crew->ended[number]) && !atomic_load(&crew->stop))
                stop_process(crew, number, "has ended");
            const int waits = atomic_load(&crew->box->answers[number]) != stamp;
            /* Who has not done the first half is the reason that the others wait. */
            const int half = atomic_load(&crew->halves[number].stamp) == stamp;
            if (waits && (late < 0 || !half))
                late = number;
        }
        ticks = late >= 0 && stamp == last ? ticks + 1 : 0;
        last = stamp;
        if (ticks > crew->late_ticks)
            stop_process(crew, late, "is late");
    }
    return NULL;
}

/* Start the workers and their watcher; return NULL if a thread cannot be started. `box` and `layers` must outlive them. */
struct crew *moedoctor_start(struct box *box, const struct layer *layers, int64_t layer_count, int64_t experts, int64_t hidden,
                             int64_t inner, int64_t workers, const int *cores, int64_t late_ms)
{
    struct crew *crew = aligned_alloc(64, (sizeof *crew + 63) / 64 * 64);
    if (!crew)
        return NULL;
    memset(crew, 0, sizeof *crew);
    crew->box = box;
    crew->layers = layers;
    crew->layer_count = layer_count, crew->experts = experts, crew->hidden = hidden, crew->inner = inner;
    crew->late_ticks = late_ms * 1000000 / TICK_NS;
    crew->sums = (float *)(box->hidden + MOST_TOKENS * hidden);
    crew->between = malloc(MOST_EXPERTS * MOST_TOKENS * inner * sizeof(float));
    crew->workers = workers; /* before a worker divides rows by it */
    memcpy(crew->cores, cores, workers * sizeof *cores);
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* signals are the other threads' business */
    int64_t started = 0;
    for (; crew->between && started < workers; started++) {
        struct worker *worker = malloc(sizeof *worker);
        if (!worker)
            break;
        *worker = (struct worker){crew, started};
        if (pthread_create(&crew->threads[started], NULL, work, worker)) {
            free(worker);
            break;
        }
    }
    const int watched = started == workers && pthread_create(&crew->watcher, NULL, watch, crew) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (watched)
        return crew;
    atomic_store(&crew->stop, 1);
    while (started-- > 0)
        pthread_join(crew->threads[started], NULL);
    free(crew->between);
    free(crew);
    return NULL;
}

/* Stop all threads. No request may be under way. */
void moedoctor_stop(struct crew *crew)
{
    atomic_store(&crew->stop, 1);
    atomic_fetch_add(&crew->wakes, 1);
    syscall(SYS_futex, &crew->wakes, FUTEX_WAKE_PRIVATE, MOST_WORKERS, NULL, NULL, 0);
    pthread_join(crew->watcher, NULL);
    for (int64_t number = 0; number < crew->workers; number++)
        pthread_join(crew->threads[number], NULL);
    free(crew->between);
    free(crew);
}

/* Let a worker end or hang at its next request: a fault that tests plant. */
void moedoctor_fault(struct crew *crew, int64_t number, int fault)
{
    atomic_store(&crew->faults[number], fault);
}
