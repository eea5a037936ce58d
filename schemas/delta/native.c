/* The delta codec's inner loops, compiled.

Each has a twin in numpy (positions.py, ranks.py, state.py, statehash.py, values.py) that gives the same to the bit; the
tests compare them. Where this module can't be built the twins do the work. What comes off the wire is checked here
before it is used as an index, so damaged bytes end as ValueError, never as a wild read. The interpreter's lock is given
up while a loop runs: weights are decoded beside an engine that samples.

Arrays come as contiguous buffers; elements are unsigned, 1, 2 or 4 bytes wide, little-endian. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))
#define OCTAVES 256
#define ROW 4096                 /* distances that are cut at the same bit */
#define BITMAP 255               /* in place of a row's cut */
#define ESCAPE 255               /* a high part of so much or more */
#define MAX_CUT 56
#define FARTHEST (1ULL << 44)
#define AHEAD 32                 /* elements whose cache lines are asked for ahead: a miss takes about as long */

/* A loop for the vector units that the machine turns out to have. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#endif
#ifndef FOR_EACH_CPU
#define FOR_EACH_CPU
#endif

/* `CALL` for an element's width as a constant, so that each width is a loop of its own. */
#define BY_WIDTH(width, CALL) \
    switch (width) { case 1: { enum { W = 1 }; CALL; } break; case 2: { enum { W = 2 }; CALL; } break; \
                     default: { enum { W = 4 }; CALL; } }

ALWAYS uint32_t load(const void *at, Py_ssize_t i, int width)
{
    if (width == 1) return ((const uint8_t *)at)[i];
    if (width == 2) return ((const uint16_t *)at)[i];
    return ((const uint32_t *)at)[i];
}

ALWAYS void store(void *at, Py_ssize_t i, uint32_t bits, int width)
{
    if (width == 1) ((uint8_t *)at)[i] = (uint8_t)bits;
    else if (width == 2) ((uint16_t *)at)[i] = (uint16_t)bits;
    else ((uint32_t *)at)[i] = bits;
}

ALWAYS unsigned octave(uint32_t bits, int mantissa, int width)
{
    return mantissa < 0 ? 0 : (uint8_t)((bits >> mantissa) & ((1u << (8 * width - 1 - mantissa)) - 1));
}

/* Bits as a place on the line of values, and back. Signs are a coin's toss: no branch. */
ALWAYS uint32_t on_line(uint32_t bits, int mantissa, int width)
{
    uint32_t flip = mantissa < 0 ? 0 : (1u << (8 * width - 1)) - 1;
    return bits ^ ((0 - (bits >> (8 * width - 1))) & flip);
}

static int fits(Py_buffer *one, Py_ssize_t bytes)
{
    if (one->len == bytes) return 1;
    PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %zd belong", one->len, bytes);
    return 0;
}

static int known(int width, int mantissa)
{
    if ((width == 1 || width == 2 || width == 4) && mantissa < 8 * width) return 1;
    PyErr_Format(PyExc_ValueError, "elements of %d bytes, %d bits of them mantissa", width, mantissa);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ state.py */

ALWAYS Py_ssize_t find_differing(const char *old, const char *new, Py_ssize_t n, int64_t start, int64_t *places,
                                 void *values, int width)
{
    const Py_ssize_t block = 32 / width;
    Py_ssize_t count = 0, i = 0;
    while (i < n) {
        Py_ssize_t end = i + block < n ? i + block : n;
        if (end - i == block) {
            uint64_t a[4], b[4];
            memcpy(a, old + i * width, 32);
            memcpy(b, new + i * width, 32);
            if (!((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]))) { i = end; continue; }
        }
        for (; i < end; i++) {
            uint32_t bits = load(new, i, width);
            places[count] = start + i;
            store(values, count, bits, width);
            count += bits != load(old, i, width);
        }
    }
    return count;
}

static PyObject *differing(PyObject *self, PyObject *args)
{
    Py_buffer old, new, places, values;
    long long start;
    int width;
    Py_ssize_t n, count = 0;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*iLw*w*", &old, &new, &width, &start, &places, &values)) return NULL;
    n = known(width, -1) ? old.len / width : 0;
    if (!PyErr_Occurred() && fits(&new, old.len) && places.len >= n * 8 && values.len >= n * width) {
        Py_BEGIN_ALLOW_THREADS
        BY_WIDTH(width, count = find_differing(old.buf, new.buf, n, start, places.buf, values.buf, W))
        Py_END_ALLOW_THREADS
        result = PyLong_FromSsize_t(count);
    } else if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no room for what differs");
    PyBuffer_Release(&old); PyBuffer_Release(&new); PyBuffer_Release(&places); PyBuffer_Release(&values);
    return result;
}

ALWAYS int gather(const char *from, Py_ssize_t size, const int64_t *places, Py_ssize_t n, void *out, int width)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(from + places[i + AHEAD] * width, 0);
        if ((uint64_t)places[i] >= (uint64_t)size) return 0;
        store(out, i, load(from, places[i], width), width);
    }
    return 1;
}

/* Nearly all positions are of 4 bytes: those that are held until the weights are written. */
ALWAYS int scatter(char *to, Py_ssize_t size, const void *places, Py_ssize_t n, const void *values, int wide, int width)
{
    const uint32_t *narrow = places;
    const int64_t *broad = places;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(to + (wide ? broad[i + AHEAD] : narrow[i + AHEAD]) * width, 1);
        uint64_t at = wide ? (uint64_t)broad[i] : narrow[i];
        if (at >= (uint64_t)size) return 0;
        store(to, at, load(values, i, width), width);
    }
    return 1;
}

static PyObject *at_places(PyObject *args, int taking)
{
    Py_buffer array, places, values;
    int width, inside = 1;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, taking ? "y*iy*w*" : "w*iy*y*", &array, &width, &places, &values)) return NULL;
    n = known(width, -1) ? values.len / width : 0;
    if (!PyErr_Occurred() && ((!taking && places.len == 4 * n) || fits(&places, 8 * n))) {
        Py_ssize_t size = array.len / width;
        int wide = places.len == 8 * n;
        Py_BEGIN_ALLOW_THREADS
        if (taking) { BY_WIDTH(width, inside = gather(array.buf, size, places.buf, n, values.buf, W)) }
        else if (wide) { BY_WIDTH(width, inside = scatter(array.buf, size, places.buf, n, values.buf, 1, W)) }
        else { BY_WIDTH(width, inside = scatter(array.buf, size, places.buf, n, values.buf, 0, W)) }
        Py_END_ALLOW_THREADS
        if (!inside) PyErr_SetString(PyExc_IndexError, "a position beyond the last element");
    }
    PyBuffer_Release(&array); PyBuffer_Release(&places); PyBuffer_Release(&values);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *self, PyObject *args) { return at_places(args, 1); }
static PyObject *put(PyObject *self, PyObject *args) { return at_places(args, 0); }

/* -------------------------------------------------------------------------------------------- statehash.py */

ALWAYS void count_in(uint64_t where, uint32_t bits, uint64_t *first, uint64_t *second)
{
    uint64_t x = where + bits;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ x >> 27) * 0x94D049BB133111EBULL;
    x ^= x >> 31;
    *first += x;
    x *= 0xD6E8FEB86659FD93ULL;
    *second += x ^ x >> 32;
}

ALWAYS void add_up(uint64_t key, const int64_t *places, uint64_t start, const void *values, const void *old,
                   Py_ssize_t n, uint64_t *sums, int width)
{
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t where = ((places ? (uint64_t)places[i] : start + (uint64_t)i) << 32) + key;
        count_in(where, load(values, i, width), &a, &b);
        if (old) count_in(where, load(old, i, width), &c, &d);
    }
    sums[0] = a - c;
    sums[1] = b - d;
}

FOR_EACH_CPU static void sum_up(uint64_t key, const int64_t *places, uint64_t start, const void *values,
                                const void *old, Py_ssize_t n, uint64_t *sums, int width)
{
    BY_WIDTH(width, add_up(key, places, start, values, old, n, sums, W))
}

static PyObject *element_sums(PyObject *self, PyObject *args)
{
    unsigned long long key, start;
    PyObject *places_or_none, *old_or_none;
    Py_buffer values, places = {0}, old = {0};
    int width;
    Py_ssize_t n;
    uint64_t sums[2] = {0, 0};
    if (!PyArg_ParseTuple(args, "KOKy*Oi", &key, &places_or_none, &start, &values, &old_or_none, &width)) return NULL;
    n = known(width, -1) ? values.len / width : 0;
    if (!PyErr_Occurred()
        && (places_or_none == Py_None
            || (!PyObject_GetBuffer(places_or_none, &places, PyBUF_SIMPLE) && fits(&places, n * 8)))
        && (old_or_none == Py_None
            || (!PyObject_GetBuffer(old_or_none, &old, PyBUF_SIMPLE) && fits(&old, n * width)))) {
        Py_BEGIN_ALLOW_THREADS
        sum_up(key, places.buf, start, values.buf, old.buf, n, sums, width);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    if (places.obj) PyBuffer_Release(&places);
    if (old.obj) PyBuffer_Release(&old);
    if (PyErr_Occurred()) return NULL;
    return Py_BuildValue("KK", (unsigned long long)sums[0], (unsigned long long)sums[1]);
}

/* -------------------------------------------------------------------------------------------- positions.py */

typedef struct { const uint8_t *at; int width, shift; } Low;

/* Low bits of a row's distances, from the column that holds them; rows begin at whole bytes. */
ALWAYS void add_bits(uint64_t *gaps, Py_ssize_t n, const uint8_t *column, int shift, int width)
{
    const Py_ssize_t per = 8 / width;
    const unsigned mask = (1u << width) - 1;
    Py_ssize_t i = 0, byte = 0;
    for (; i + per <= n; i += per, byte++)
        for (int k = 0; k < per; k++) gaps[i + k] |= (uint64_t)((column[byte] >> (width * k)) & mask) << shift;
    for (int k = 0; i < n; i++, k++) gaps[i] |= (uint64_t)((column[byte] >> (width * k)) & mask) << shift;
}

/* Distances of the rows that are cut at one bit. Returns how many escapes were used, or -1. */
FOR_EACH_CPU static Py_ssize_t put_back(const uint8_t *cuts, Py_ssize_t n, int cut, const uint8_t *high,
                                        const uint64_t *escapes, Py_ssize_t left, const Low *lows, int columns,
                                        uint64_t *gaps)
{
    Py_ssize_t used = 0, at = 0;
    for (Py_ssize_t begin = 0; begin < n; begin += ROW) {
        if (cuts[begin / ROW] != cut) continue;
        Py_ssize_t size = n - begin < ROW ? n - begin : ROW;
        uint64_t *row = gaps + begin;
        for (Py_ssize_t i = 0; i < size; i++) row[i] = (uint64_t)high[at + i] << cut;
        const uint8_t *next = high + at, *end = high + at + size;
        while ((next = memchr(next, ESCAPE, end - next))) {
            if (used == left || escapes[used] > FARTHEST >> cut) return -1;
            row[next++ - (high + at)] += escapes[used++] << cut;
        }
        for (int k = 0; k < columns; k++) {
            const uint8_t *column = lows[k].at + at * lows[k].width / 8;
            switch (lows[k].width) {
            case 8: add_bits(row, size, column, lows[k].shift, 8); break;
            case 4: add_bits(row, size, column, lows[k].shift, 4); break;
            case 2: add_bits(row, size, column, lows[k].shift, 2); break;
            default: add_bits(row, size, column, lows[k].shift, 1);
            }
        }
        at += size;
    }
    return used;
}

static int add_gaps(uint64_t *gaps, Py_ssize_t n)
{
    uint64_t place = (uint64_t)-1, most = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        most |= gaps[i];
        place += gaps[i] + 1;
        gaps[i] = place;
    }
    return most <= FARTHEST; /* at most 2^18 of them: no sum wraps around where each is below */
}

static PyObject *positions(PyObject *self, PyObject *args)
{
    Py_buffer cuts, high, escapes, mapped, out, held[10];
    PyObject *lows;
    Py_ssize_t n, of_cut[256] = {0}, at_high = 0, at_escape = 0, at_map = 0, at_low = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*y*O!w*", &cuts, &high, &escapes, &mapped, &PyTuple_Type, &lows, &out))
        return NULL;
    n = out.len / 8;
    if (!fits(&cuts, (n + ROW - 1) / ROW)) goto done;
    for (Py_ssize_t begin = 0; begin < n; begin += ROW)
        of_cut[((uint8_t *)cuts.buf)[begin / ROW]] += begin + ROW < n ? ROW : n - begin;
    for (int cut = 0; cut < 256 && !PyErr_Occurred(); cut++) {
        Py_ssize_t size = of_cut[cut], used = 0;
        if (!size) continue;
        if (cut == BITMAP) {
            if (!fits(&mapped, 8 * size)) break;
            for (Py_ssize_t begin = 0; begin < n; begin += ROW) {
                if (((uint8_t *)cuts.buf)[begin / ROW] != BITMAP) continue;
                Py_ssize_t rest = n - begin < ROW ? n - begin : ROW;
                memcpy((uint64_t *)out.buf + begin, (const uint64_t *)mapped.buf + at_map, 8 * rest);
                at_map += rest;
            }
            continue;
        }
        if (cut > MAX_CUT || high.len - at_high < size) {
            PyErr_SetString(PyExc_ValueError, "distances that are cut nowhere");
            break;
        }
        Low columns[10];
        int found = 0;
        for (int width = 8, shift = 0; width; width /= 2) {
            for (; cut - shift >= width && !PyErr_Occurred(); shift += width) {
                PyObject *column = at_low < PyTuple_GET_SIZE(lows) ? PyTuple_GET_ITEM(lows, at_low++) : Py_None;
                if (PyObject_GetBuffer(column, &held[found], PyBUF_SIMPLE)) break;
                columns[found] = (Low){held[found].buf, width, shift};
                fits(&held[found++], (size * width + 7) / 8);
            }
        }
        if (!PyErr_Occurred()) {
            Py_BEGIN_ALLOW_THREADS
            used = put_back(cuts.buf, n, cut, (const uint8_t *)high.buf + at_high,
                            (const uint64_t *)escapes.buf + at_escape, escapes.len / 8 - at_escape, columns, found,
                            out.buf);
            Py_END_ALLOW_THREADS
            if (used < 0) PyErr_SetString(PyExc_ValueError, "distances that are beyond all weights");
            at_high += size;
            at_escape += used;
        }
        while (found) PyBuffer_Release(&held[--found]);
    }
    if (!PyErr_Occurred() && (at_escape != escapes.len / 8 || at_high != high.len))
        PyErr_SetString(PyExc_ValueError, "distances that nobody has");
    if (!PyErr_Occurred() && !add_gaps(out.buf, n))
        PyErr_SetString(PyExc_ValueError, "distances that are beyond all weights");
done:
    PyBuffer_Release(&cuts); PyBuffer_Release(&high); PyBuffer_Release(&escapes); PyBuffer_Release(&mapped);
    PyBuffer_Release(&out);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------ ranks.py */

/* A tensor's elements by octave: `seen` is moved on, and each changed one gets its octave and its rank there. */
ALWAYS void count_octaves(const void *values, Py_ssize_t size, int mantissa, const int64_t *places, Py_ssize_t n,
                          int64_t *seen, uint8_t *octaves, int64_t *ranks, int width)
{
    Py_ssize_t i = 0;
    for (Py_ssize_t k = 0; k < n; k++) {
        for (; i < places[k]; i++) seen[octave(load(values, i, width), mantissa, width)]++;
        octaves[k] = (uint8_t)octave(load(values, i, width), mantissa, width);
        ranks[k] = seen[octaves[k]];
    }
    for (; i < size; i++) seen[octave(load(values, i, width), mantissa, width)]++;
}

static PyObject *to_ranks(PyObject *self, PyObject *args)
{
    Py_buffer values, places, seen, octaves, ranks;
    int width, mantissa;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "y*iiy*w*w*w*", &values, &width, &mantissa, &places, &seen, &octaves, &ranks))
        return NULL;
    n = places.len / 8;
    if (known(width, mantissa) && fits(&seen, 8 * OCTAVES) && fits(&octaves, n) && fits(&ranks, 8 * n)) {
        const int64_t *each = places.buf;
        int ascending = n == 0 || (each[0] >= 0 && each[n - 1] < values.len / width);
        for (Py_ssize_t i = 1; i < n; i++) ascending &= each[i - 1] < each[i];
        if (!ascending) PyErr_SetString(PyExc_IndexError, "positions that don't ascend to the last element");
        else {
            Py_BEGIN_ALLOW_THREADS
            BY_WIDTH(width, count_octaves(values.buf, values.len / width, mantissa, places.buf, n, seen.buf,
                                          octaves.buf, ranks.buf, W))
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&values); PyBuffer_Release(&places); PyBuffer_Release(&seen); PyBuffer_Release(&octaves);
    PyBuffer_Release(&ranks);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* The elements of a tensor whose rank is wanted next in their octave. `at`: rank of each octave's next element; `next`:
   index in `ranks` of the next wanted one of each octave, below `ends`. */
ALWAYS Py_ssize_t find_ranks(const void *values, Py_ssize_t size, int mantissa, int64_t offset, const int64_t *ranks,
                             int64_t *at, int64_t *next, const int64_t *ends, int64_t *out, int width)
{
    int64_t wanted[OCTAVES];
    Py_ssize_t count = 0;
    for (int o = 0; o < OCTAVES; o++) wanted[o] = next[o] < ends[o] ? ranks[next[o]] : -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        unsigned o = octave(load(values, i, width), mantissa, width);
        if (at[o]++ == wanted[o]) {
            out[count++] = offset + i;
            next[o]++;
            wanted[o] = next[o] < ends[o] ? ranks[next[o]] : -1;
        }
    }
    return count;
}

static PyObject *from_ranks(PyObject *self, PyObject *args)
{
    Py_buffer values, ranks, at, next, ends, out;
    int width, mantissa;
    long long offset;
    Py_ssize_t n, count = 0;
    if (!PyArg_ParseTuple(args, "y*iiLy*w*w*y*w*", &values, &width, &mantissa, &offset, &ranks, &at, &next, &ends,
                          &out)) return NULL;
    n = ranks.len / 8;
    if (known(width, mantissa) && fits(&at, 8 * OCTAVES) && fits(&next, 8 * OCTAVES) && fits(&ends, 8 * OCTAVES)) {
        int64_t left = 0; /* what can be found: each index between next and end once */
        for (int o = 0; o < OCTAVES; o++) {
            int64_t from = ((int64_t *)next.buf)[o], to = ((int64_t *)ends.buf)[o];
            if (from < 0 || from > to || to > n) { left = -1; break; }
            left += to - from;
        }
        if (left < 0 || left > out.len / 8) PyErr_SetString(PyExc_ValueError, "ranks that are of no octave");
        else {
            Py_BEGIN_ALLOW_THREADS
            BY_WIDTH(width, count = find_ranks(values.buf, values.len / width, mantissa, offset, ranks.buf, at.buf,
                                               next.buf, ends.buf, out.buf, W))
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&values); PyBuffer_Release(&ranks); PyBuffer_Release(&at); PyBuffer_Release(&next);
    PyBuffer_Release(&ends); PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

/* ----------------------------------------------------------------------------------------------- values.py */

ALWAYS uint32_t moved(uint32_t was, uint32_t distance, uint32_t turned, int mantissa, int width)
{
    uint32_t place = on_line(was, mantissa, width) + ((distance - turned) ^ (0 - turned));
    if (width < 4) place &= (1u << 8 * (width & 3)) - 1;
    return on_line(place, mantissa, width);
}

/* All go the least distance; which ones are small enough to go further is written to `small`, and how many of each
   octave there are to `of`. Neither can be guessed: no branches. */
ALWAYS Py_ssize_t step_all(const void *old, const uint8_t *down, unsigned below, int mantissa, uint32_t least,
                           Py_ssize_t n, void *restrict new, uint32_t *restrict small, int width)
{
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t was = load(old, i, width);
        store(new, i, moved(was, least, down[i / 8] >> (7 - i % 8) & 1, mantissa, width), width);
        small[found] = (uint32_t)i;
        found += octave(was, mantissa, width) < below;
    }
    return found;
}

ALWAYS void step_small(const void *old, const uint8_t *down, const uint8_t *const *planes, const int *shifts, int count,
                       int mantissa, uint32_t least, const uint32_t *small, Py_ssize_t n, void *new, int width)
{
    Py_ssize_t next[OCTAVES] = {0}, before = 0;
    for (Py_ssize_t j = 0; j < n; j++) next[octave(load(old, small[j], width), mantissa, width)]++;
    for (int o = 0; o < OCTAVES; o++) { Py_ssize_t here = next[o]; next[o] = before; before += here; }
    for (Py_ssize_t j = 0; j < n; j++) {
        Py_ssize_t i = small[j];
        uint32_t was = load(old, i, width), distance = least;
        Py_ssize_t k = next[octave(was, mantissa, width)]++;
        for (int p = 0; p < count; p++) distance += (uint32_t)planes[p][k] << shifts[p];
        store(new, i, moved(was, distance, down[i / 8] >> (7 - i % 8) & 1, mantissa, width), width);
    }
}

FOR_EACH_CPU static Py_ssize_t step(const void *old, const uint8_t *down, unsigned below, int mantissa, uint32_t least,
                                    Py_ssize_t n, void *new, uint32_t *small, int width)
{
    Py_ssize_t found = 0;
    BY_WIDTH(width, found = step_all(old, down, below, mantissa, least, n, new, small, W))
    return found;
}

static PyObject *stepped(PyObject *self, PyObject *args)
{
    Py_buffer old, down, new, held[4];
    PyObject *planes;
    int width, mantissa, found = 0, shifts[4], count = 0;
    unsigned below, least;
    Py_ssize_t n, smaller = 0;
    const uint8_t *columns[4];
    uint32_t *small = NULL;
    if (!PyArg_ParseTuple(args, "y*iiy*IO!Iw*", &old, &width, &mantissa, &down, &below, &PyTuple_Type, &planes, &least,
                          &new)) return NULL;
    n = known(width, mantissa) ? old.len / width : 0;
    if (PyErr_Occurred() || !fits(&down, (n + 7) / 8) || !fits(&new, old.len)) goto done;
    if (n > UINT32_MAX || !(small = PyMem_Malloc(n * 4 + 4))) { PyErr_NoMemory(); goto done; }
    Py_BEGIN_ALLOW_THREADS
    smaller = step(old.buf, down.buf, below, mantissa, least, n, new.buf, small, width);
    Py_END_ALLOW_THREADS
    for (; found < width && found < PyTuple_GET_SIZE(planes); found++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(planes, found), &held[found], PyBUF_SIMPLE)) goto done;
        if (!held[found].len) continue;
        if (!fits(&held[found], smaller)) { found++; goto done; }
        columns[count] = held[found].buf;
        shifts[count++] = 8 * found;
    }
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, step_small(old.buf, down.buf, columns, shifts, count, mantissa, least, small, smaller, new.buf, W))
    Py_END_ALLOW_THREADS
done:
    PyMem_Free(small);
    while (found) PyBuffer_Release(&held[--found]);
    PyBuffer_Release(&old); PyBuffer_Release(&down); PyBuffer_Release(&new);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"differing", differing, METH_VARARGS, NULL},
    {"take", take, METH_VARARGS, NULL},
    {"put", put, METH_VARARGS, NULL},
    {"element_sums", element_sums, METH_VARARGS, NULL},
    {"positions", positions, METH_VARARGS, NULL},
    {"to_ranks", to_ranks, METH_VARARGS, NULL},
    {"from_ranks", from_ranks, METH_VARARGS, NULL},
    {"stepped", stepped, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
