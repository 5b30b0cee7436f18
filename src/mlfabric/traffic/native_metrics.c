/* The compiled form of what NumPy does in dispersion.py, envelopes.py, backlogs.py, bursts.py and queueing.py.
 *
 * Same results, required by tests; built on demand by native.py, never needed. Plain C99, no state of its own:
 * every array belongs to the caller. */
#include <math.h>
#include <string.h>

#include "native_types.h"

/* More than any number of bytes. */
#define BEYOND 1e300

#define BITS 14
#define BINS (1 << BITS)

/* One pass over all window positions x in [t[0], t[n-1] - tau]: the time spent at each value of W(x), the bytes in
 * [x, x+tau]. With `moments`, adds up integrals of W, W^2, N, N^2 (N: packets). For each of `targets` prefixes,
 * histogram[k] counts the time during which W >> (shift + BITS) equals prefix[k], by the next BITS bits. */
void window_sweep(const i64 *t, const u32 *size, i64 n, i64 tau, double *moments, int targets, const i64 *prefix,
                  int shift, i64 *histogram) {
  i64 x = t[0], finish = t[n - 1] - tau, low = 0, high = 0, w = 0;
  double m1 = 0, m2 = 0, c1 = 0, c2 = 0;
  while (high < n && t[high] <= x + tau) w += size[high++];
  while (low < n && t[low] <= x) w -= size[low++];
  while (x < finish) {
    i64 add = high < n ? t[high] - tau : INT64_MAX, drop = t[low];
    int adding = add <= drop;
    i64 next = adding ? add : drop;
    if (next > finish) next = finish;
    i64 d = next - x;
    if (d) {
      i64 top = w >> shift;
      if (targets == 1 && prefix[0] == 0 && moments) {
        histogram[top & (BINS - 1)] += d;
      } else {
        for (int k = 0; k < targets; k++)
          if (top >> BITS == prefix[k]) histogram[(i64)k * BINS + (top & (BINS - 1))] += d;
      }
      if (moments) {
        double dd = (double)d, ww = (double)w, cc = (double)(high - low);
        m1 += dd * ww;
        m2 += dd * ww * ww;
        c1 += dd * cc;
        c2 += dd * cc * cc;
      }
    }
    x = next;
    if (adding)
      w += size[high++];
    else
      w -= size[low++];
  }
  if (moments) {
    moments[0] = m1;
    moments[1] = m2;
    moments[2] = c1;
    moments[3] = c2;
  }
}

#define BLOCK 64
#define SUBBLOCK 8

/* Bytes of the first k packets: from full sums, or from sizes and the sums at every 64th packet. */
typedef struct {
  const i64 *full;
  const u32 *size;
  const i64 *exact;
} sums_type;

static inline i64 total(const sums_type *sums, i64 k) {
  if (sums->full) return sums->full[k];
  i64 sum = sums->exact[k >> 6];
  for (i64 i = k & ~(i64)63; i < k; i++) sum += sums->size[i];
  return sum;
}

/* The first index at or after `from` whose time exceeds `limit`, by doubling steps, then bisection. */
static inline i64 beyond(const i64 *t, i64 n, i64 from, i64 limit) {
  i64 low = from, step = 16;
  while (low + step < n && t[low + step] <= limit) {
    low += step;
    step *= 2;
  }
  i64 up = low + step < n ? low + step : n;
  while (low < up) {
    i64 middle = (low + up) / 2;
    if (t[middle] <= limit) low = middle + 1;
    else up = middle;
  }
  return low;
}

/* Opens windows that start at every packet, but only where as many packets as the best window needs, were they all
 * of the largest size, fit into tau: one comparison rules out nearly every start. */
static void open_by_count(const i64 *t, i64 n, i64 tau, const sums_type *sums, i64 largest, i64 *best, i64 *where) {
  i64 more = (*best + largest - 1) / largest - 1;
  if (more < 0) more = 0;
  for (i64 i = 0; i + more < n; i++) {
    if (t[i + more] - t[i] > tau) continue;
    i64 w = total(sums, beyond(t, n, i + more, t[i] + tau)) - total(sums, i);
    if (w > *best || (w == *best && i < *where)) {
      *best = w;
      *where = i;
      more = (w + largest - 1) / largest - 1;
    }
  }
}

/* The same where windows hold many packets. reach[b] is where the window of block b's first packet ends, which
 * bounds all windows that start in the block before it; only blocks whose bound is not below the best window found
 * are opened. */
static void open_by_bound(const i64 *t, i64 n, i64 tau, const sums_type *sums, const i64 *reach, i64 *best,
                          i64 *where) {
  i64 blocks = (n + BLOCK - 1) / BLOCK;
  for (i64 b = 0; b < blocks; b++) {
    i64 first = b * BLOCK, stop = first + BLOCK < n ? first + BLOCK : n;
    i64 farthest = b + 1 < blocks ? reach[b + 1] : n, high = reach[b];
    if (total(sums, farthest) - total(sums, first) < *best) continue;
    for (i64 part = first; part < stop; part += SUBBLOCK) {
      /* The same bound again for eight packets at a time. */
      i64 end = part + SUBBLOCK < stop ? part + SUBBLOCK : stop, next = farthest;
      while (high < n && t[high] - t[part] <= tau) high++;
      if (end < stop) {
        next = high;
        while (next < n && t[next] - t[end] <= tau) next++;
      }
      if (total(sums, next) - total(sums, part) >= *best) {
        for (i64 i = part; i < end; i++) {
          while (high < n && t[high] - t[i] <= tau) high++;
          i64 w = total(sums, high) - total(sums, i);
          if (w > *best || (w == *best && i < *where)) {
            *best = w;
            *where = i;
          }
        }
      }
      high = next > high ? next : high;
      if (end == stop) break;
    }
  }
}

/* Most bytes in any closed window [t[i], t[i] + tau], and the first i that has them; no packet exceeds `largest`.
 * `reach` has room for one index per block of 64. */
i64 window_maximum(const i64 *t, i64 n, i64 tau, const i64 *full, const u32 *size, const i64 *exact, i64 largest,
                   i64 *reach, i64 *where) {
  sums_type sums = {full, size, exact};
  i64 best = -1, high = 0, blocks = (n + BLOCK - 1) / BLOCK;
  for (i64 b = 0; b < blocks; b++) {
    i64 first = b * BLOCK;
    high = beyond(t, n, high, t[first] + tau);
    reach[b] = high;
    i64 w = total(&sums, high) - total(&sums, first);
    if (w > best) {
      best = w;
      *where = first;
    }
  }
  if (largest > 0 && best / largest < 4 * BLOCK) open_by_count(t, n, tau, &sums, largest, &best, where);
  else open_by_bound(t, n, tau, &sums, reach, &best, where);
  return best;
}

/* Bytes of the aligned bin that is being filled, its end, and the most that one held. */
typedef struct {
  i64 tau, end, held, most;
} bin_type;

static inline void add_to_bin(bin_type *bin, i64 at, i64 bytes) {
  if (at >= bin->end) {
    if (bin->held > bin->most) bin->most = bin->held;
    bin->held = 0;
    bin->end = at < bin->end + bin->tau ? bin->end + bin->tau : at - at % bin->tau + bin->tau;
  }
  bin->held += bytes;
}

/* Most bytes in any bin [t[0] + k tau, t[0] + (k+1) tau), for each tau. All are multiples of the first, so the others
 * are fed whole bins of it. `bins` has room for one each. */
void binned_maxima(const i64 *t, const u32 *size, i64 n, i64 count, const i64 *tau, bin_type *bins, i64 *most) {
  for (i64 k = 0; k < count; k++) bins[k] = (bin_type){tau[k], tau[k], 0, 0};
  for (i64 i = 0; i < n; i++) {
    i64 at = t[i] - t[0];
    if (at >= bins[0].end)
      for (i64 k = 1; k < count; k++) add_to_bin(&bins[k], bins[0].end - tau[0], bins[0].held);
    add_to_bin(&bins[0], at, size[i]);
  }
  for (i64 k = 1; k < count; k++) add_to_bin(&bins[k], bins[0].end - tau[0], bins[0].held);
  for (i64 k = 0; k < count; k++) most[k] = bins[k].held > bins[k].most ? bins[k].held : bins[k].most;
}

/* How many gaps fall into each class: their float form without the lowest `shift` bits. */
void gap_classes(const i64 *t, i64 n, int shift, i64 *counts) {
  for (i64 i = 1; i < n; i++) {
    float gap = (float)(t[i] - t[i - 1]);
    u32 bits;
    memcpy(&bits, &gap, 4);
    counts[bits >> shift]++;
  }
}

/* Runs of packets with bounds, as backlogs.py lays them out. Group g is blocks g*together and following. */
typedef struct {
  i64 count, together;
  const i64 *first_t, *last_t, *before, *after;
} blocks_type;

/* Marks the blocks that may hold the beginning or the end of the busiest stretch, never leaving one out, and counts
 * them; `best` rises to the best stretch between block ends. Only groups that `within` names count. */
static i64 worth_opening(const blocks_type *b, double rate, double *best, const u8 *within, u8 *open) {
  i64 groups = (b->count + b->together - 1) / b->together, opened = 0;
  double low = BEYOND, largest = 0;
#define EACH_BLOCK(g)                                                                    \
  if (!within || within[g])                                                              \
    for (i64 k = (g)*b->together; k < b->count && k < ((g) + 1) * b->together; k++)
  for (i64 g = 0; g < groups; g++) EACH_BLOCK(g) {
    double begins = (double)b->before[k] - rate * (double)b->first_t[k];
    if (begins < low) low = begins;
    double queue = (double)b->after[k] - rate * (double)b->last_t[k] - low;
    if (queue > *best) *best = queue;
    double deep = fabs((double)b->before[k] - rate * (double)b->last_t[k]);
    if (deep > largest) largest = deep;
  }
  /* Rounding of the bounds themselves must not exclude the optimum. */
  double size = fabs(*best), enough = *best - 1e-9 * (size > 1 ? size : 1) - 1e-12 * largest;
  double deepest = BEYOND, highest = -BEYOND;
  for (i64 g = 0; g < groups; g++) EACH_BLOCK(g) {
    open[k] = (double)(b->after[k] - b->before[k]) >= enough ||
              (double)b->after[k] - rate * (double)b->first_t[k] - deepest >= enough;
    double deep = (double)b->before[k] - rate * (double)b->last_t[k];
    if (deep < deepest) deepest = deep;
  }
  for (i64 g = groups - 1; g >= 0; g--) {
    if (within && !within[g]) continue;
    i64 end = (g + 1) * b->together < b->count ? (g + 1) * b->together : b->count;
    for (i64 k = end - 1; k >= g * b->together; k--) {
      if (highest - ((double)b->before[k] - rate * (double)b->last_t[k]) >= enough) open[k] = 1;
      double high = (double)b->after[k] - rate * (double)b->first_t[k];
      if (high > highest) highest = high;
      opened += open[k];
    }
  }
  return opened;
#undef EACH_BLOCK
}

/* A busiest stretch as far as it is known while packets pass. */
typedef struct {
  double low, best;
  i64 low_at, open, close;
} stretch_type;

static void pass_packets(const i64 *t, const sums_type *sums, i64 first, i64 stop, double rate, stretch_type *s) {
  i64 sum = total(sums, first);
  for (i64 i = first; i < stop; i++) {
    double begins = (double)sum - rate * (double)t[i];
    sum = sums->full ? sums->full[i + 1] : sum + sums->size[i];
    if (begins < s->low) {
      s->low = begins;
      s->low_at = i;
    }
    double queue = (double)sum - rate * (double)t[i] - s->low;
    if (queue > s->best) {
      s->best = queue;
      s->open = s->low_at;
      s->close = i;
    }
  }
}

#define LANES 8
#define PAIRS (LANES / 2)
typedef double pair __attribute__((vector_size(16)));
typedef i64 pair_mask __attribute__((vector_size(16)));

#ifdef __SSE2__
static inline pair lower(pair a, pair b) { return __builtin_ia32_minpd(a, b); }
static inline pair higher(pair a, pair b) { return __builtin_ia32_maxpd(a, b); }
#else
static inline pair chosen(pair_mask m, pair a, pair b) { return (pair)((m & (pair_mask)a) | (~m & (pair_mask)b)); }
static inline pair lower(pair a, pair b) { return chosen(a < b, a, b); }
static inline pair higher(pair a, pair b) { return chosen(a > b, a, b); }
#endif

/* The lowest start and the highest queue of eight rates over packets [first, stop), `sum` bytes before them. Pairs
 * of rates stay in registers, which is why they are written out. */
static i64 pass_block(const i64 *t, const sums_type *sums, i64 first, i64 stop, i64 sum, const pair *rate, pair *low,
                      pair *best) {
  pair l0 = low[0], l1 = low[1], l2 = low[2], l3 = low[3], b0 = best[0], b1 = best[1], b2 = best[2], b3 = best[3];
  for (i64 i = first; i < stop; i++) {
    pair at = {(double)t[i], (double)t[i]}, before = {(double)sum, (double)sum};
    sum = sums->full ? sums->full[i + 1] : sum + sums->size[i];
    pair after = {(double)sum, (double)sum}, drained;
#define PASS(k)                        \
  drained = rate[k] * at;              \
  l##k = lower(before - drained, l##k); \
  b##k = higher(after - drained - l##k, b##k);
    PASS(0) PASS(1) PASS(2) PASS(3)
#undef PASS
  }
  low[0] = l0, low[1] = l1, low[2] = l2, low[3] = l3;
  best[0] = b0, best[1] = b1, best[2] = b2, best[3] = b3;
  return sum;
}

/* Eight rates in one pass over all packets; only the blocks that decided are passed again, for the packets. */
static void pass_all(const i64 *t, i64 n, const sums_type *sums, const double *rate, i64 *found) {
  pair rates[PAIRS], low[PAIRS], best[PAIRS];
  i64 low_block[LANES], entry_block[LANES], top_block[LANES], sum = 0;
  memcpy(rates, rate, sizeof rates);
  for (int r = 0; r < LANES; r++) {
    low[r / 2][r % 2] = BEYOND;
    best[r / 2][r % 2] = -BEYOND;
    low_block[r] = entry_block[r] = top_block[r] = -1;
  }
  for (i64 first = 0; first < n; first += BLOCK) {
    pair low_before[PAIRS], best_before[PAIRS];
    memcpy(low_before, low, sizeof low);
    memcpy(best_before, best, sizeof best);
    sum = pass_block(t, sums, first, first + BLOCK < n ? first + BLOCK : n, sum, rates, low, best);
    for (int r = 0; r < LANES; r++) {
      if (best[r / 2][r % 2] > best_before[r / 2][r % 2]) {
        entry_block[r] = low_block[r];
        top_block[r] = first;
      }
      if (low[r / 2][r % 2] < low_before[r / 2][r % 2]) low_block[r] = first;
    }
  }
  for (int r = 0; r < LANES; r++) {
    stretch_type known = {BEYOND, -BEYOND, 0, 0, 0};
    i64 first = entry_block[r], stop = top_block[r] + BLOCK < n ? top_block[r] + BLOCK : n;
    if (first >= 0) {
      pass_packets(t, sums, first, first + BLOCK < n ? first + BLOCK : n, rate[r], &known);
      known.best = -BEYOND;
    }
    pass_packets(t, sums, top_block[r], stop, rate[r], &known);
    found[2 * r] = known.open;
    found[2 * r + 1] = known.close;
  }
}

/* First and last packet of the busiest stretch at each rate (bytes per ns). Fine blocks are runs of packets from
 * first[k] to first[k + 1]; coarse ones are `together` fine ones. `marks` has room for one of each. */
void busiest_stretches(const i64 *t, i64 n, const i64 *full, const u32 *size, const i64 *exact, const double *rate,
                       i64 rates, i64 fine, const i64 *first, const i64 *const *fine_columns, i64 coarse, i64 together,
                       const i64 *const *coarse_columns, u8 *marks, i64 *found) {
  sums_type sums = {full, size, exact};
  const i64 *const *c = coarse_columns, *const *f = fine_columns;
  blocks_type outer = {coarse, 1, c[0], c[1], c[2], c[3]}, inner = {fine, together, f[0], f[1], f[2], f[3]};
  u8 *within = marks, *open = marks + coarse;
  i64 waiting[LANES], waits = 0;
  for (i64 k = 0; k <= rates; k++) {
    if (waits == LANES || (k == rates && waits)) {
      double lanes[LANES];
      i64 results[2 * LANES];
      for (i64 w = 0; w < LANES; w++) lanes[w] = rate[waiting[w < waits ? w : 0]];
      pass_all(t, n, &sums, lanes, results);
      for (i64 w = 0; w < waits; w++) memcpy(found + 2 * waiting[w], results + 2 * w, 2 * sizeof *found);
      waits = 0;
    }
    if (k == rates) break;
    double best = -BEYOND;
    worth_opening(&outer, rate[k], &best, NULL, within);
    if (worth_opening(&inner, rate[k], &best, within, open) > fine / 4) {
      waiting[waits++] = k;
      continue;
    }
    stretch_type known = {BEYOND, -BEYOND, 0, 0, 0};
    for (i64 b = 0; b < fine; b++)
      if (within[b / together] && open[b])
        pass_packets(t, &sums, first[b], b + 1 < fine ? first[b + 1] : n, rate[k], &known);
    found[2 * k] = known.open;
    found[2 * k + 1] = known.close;
  }
}

/* A tail-dropping queue, byte by byte as in queueing.py; out: arrived, lost, most, time above the mark. */
void drop_tail(const i64 *t, const i64 *size, i64 n, double rate, double room, double mark, i64 from, i64 until,
               double *out) {
  double queue = 0, arrived = 0, lost = 0, most = 0, above = 0;
  i64 before = n ? t[0] : 0;
  for (i64 i = 0; i < n; i++) {
    int counted = t[i] >= from;
    double gap = (double)(t[i] - before);
    if (counted && queue > mark) {
      double time = (queue - mark) / rate;
      above += time < gap ? time : gap;
    }
    queue -= rate * gap;
    if (queue < 0) queue = 0;
    queue += (double)size[i];
    double over = queue - room;
    if (over > 0) queue = room;
    if (counted) {
      arrived += (double)size[i];
      if (over > 0) lost += over;
      if (queue > most) most = queue;
    }
    before = t[i];
  }
  if (queue > mark) {
    double time = (queue - mark) / rate, gap = (double)(until - before);
    above += time < gap ? time : gap;
  }
  out[0] = arrived;
  out[1] = lost;
  out[2] = most;
  out[3] = above;
}
