/* The compiled form of what NumPy does in capture/walk.py, capture/headers.py and dispersion.py.
 *
 * Same results, required by tests; built on demand by native.py, never needed. Plain C99, no state of its own:
 * every array belongs to the caller. */
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

static inline u32 load32(const u8 *p, int swapped) {
  u32 v;
  memcpy(&v, p, 4);
  return swapped ? __builtin_bswap32(v) : v;
}
static inline u32 be16(const u8 *p) { return (u32)p[0] << 8 | p[1]; }
static inline u32 be32(const u8 *p) { return (u32)p[0] << 24 | (u32)p[1] << 16 | (u32)p[2] << 8 | p[3]; }
static inline u64 be64(const u8 *p) { return (u64)be32(p) << 32 | be32(p + 4); }

/* Offsets of whole records; stop[0] is the first byte after them, stop[1] tells that no record can be there. */
i64 chain_walk(const u8 *data, i64 start, i64 end, int swapped, i64 field, i64 base, i64 least, i64 most,
               i64 multiple, i64 *offsets, i64 room, i64 *stop) {
  i64 header = base > field + 4 ? base : field + 4, count = 0, at = start;
  stop[1] = 0;
  while (count < room && at + header <= end) {
    i64 number = load32(data + at + field, swapped);
    if (number < least || number > most || number % multiple) {
      stop[1] = 1;
      break;
    }
    if (at + base + number > end) break;
    offsets[count++] = at;
    at += base + number;
  }
  stop[0] = at;
  return count;
}

/* The same for classic pcap, with the record headers' contents in one go. */
i64 pcap_records(const u8 *data, i64 start, i64 end, int swapped, i64 header, i64 most, i64 fraction_ns,
                 i64 *offset, i64 *time_ns, u32 *captured, u32 *length, i64 room, i64 *stop) {
  i64 count = 0, at = start;
  stop[1] = 0;
  while (count < room && at + header <= end) {
    const u8 *p = data + at;
    i64 number = load32(p + 8, swapped);
    if (number > most) {
      stop[1] = 1;
      break;
    }
    if (at + header + number > end) break;
    time_ns[count] = (i64)load32(p, swapped) * 1000000000 + (i64)load32(p + 4, swapped) * fraction_ns;
    captured[count] = (u32)number;
    length[count] = load32(p + 12, swapped);
    offset[count++] = at + header;
    at += header + number;
  }
  stop[0] = at;
  return count;
}

enum { SHORT, TAGGED, FRAGMENTS, NO_IP_LENGTH, CUT_TCP, ROCE_DATA, ROCE_ACK, ROCE_CNP, UNKNOWN_LINK, NON_IP };
enum { L2, IP, PAYLOAD, WIRE };
enum { BOTH, IN, OUT };

static inline int is_tag(u32 type) { return type == 0x8100 || type == 0x88a8 || type == 0x9100; }
static inline int is_extension(u32 next) {
  return next == 0 || next == 43 || next == 44 || next == 51 || next == 60 || next == 135 || next == 139 ||
         next == 140;
}
static inline i64 base_header(u32 link) {
  switch (link) {
    case 1: return 14;
    case 113: return 16;
    case 276: return 20;
    case 0: case 108: return 4;
    default: return 0;
  }
}
static inline int is_raw(u32 link) {
  return link == 12 || link == 14 || link == 101 || link == 228 || link == 229;
}

typedef struct {
  u64 word[5];
} key_type;

/* Key and layer size of one frame. */
static inline u32 decode_one(const u8 *p, i64 captured, i64 length, u32 link, int layer, key_type *key, i64 *stats) {
  i64 base = base_header(link), network = base;
  u32 type = 0;
  if (is_raw(link) || link == 0 || link == 108) {
    if (captured > base) {
      u32 version = p[base] >> 4;
      type = version == 4 ? 0x0800 : version == 6 ? 0x86dd : 0;
    }
  } else if (link == 1 || link == 113 || link == 276) {
    if (captured < base) {
      stats[SHORT]++;
    } else {
      type = be16(p + (link == 1 ? 12 : link == 113 ? 14 : 0));
      if (is_tag(type)) {
        stats[TAGGED]++;
        for (int tags = 0; tags < 4 && is_tag(type); tags++) {
          if (captured < network + 4) {
            type = 0;
            break;
          }
          type = be16(p + network + 2);
          network += 4;
        }
      }
    }
  } else {
    stats[UNKNOWN_LINK]++;
  }
  i64 present = captured - network, transport = network, ip_length = 0;
  const u8 *ip = p + network;
  int is_ip = 0, portless = 1;
  u32 protocol = 255;
  memset(key, 0, sizeof *key);
  if (type == 0x0800) {
    if (present >= 20) {
      is_ip = 1;
      transport += (ip[0] & 15) * 4;
      protocol = ip[9];
      key->word[1] = (u64)0xffff << 32 | be32(ip + 12);
      key->word[3] = (u64)0xffff << 32 | be32(ip + 16);
      portless = (be16(ip + 6) & 0x1fff) != 0;
      stats[FRAGMENTS] += portless;
      ip_length = be16(ip + 2);
    } else {
      stats[SHORT]++;
    }
  } else if (type == 0x86dd) {
    if (present >= 40) {
      is_ip = 1;
      key->word[0] = be64(ip + 8);
      key->word[1] = be64(ip + 16);
      key->word[2] = be64(ip + 24);
      key->word[3] = be64(ip + 32);
      ip_length = be16(ip + 4);
      if (ip_length) ip_length += 40;
      i64 skipped = 40;
      portless = 0;
      protocol = ip[6];
      for (int n = 0; n < 8 && is_extension(protocol) && !portless && present >= skipped + 8; n++) {
        const u8 *x = ip + skipped;
        i64 units = x[1];
        i64 size = protocol == 44 ? 8 : protocol == 51 ? (units + 2) * 4 : (units + 1) * 8;
        if (protocol == 44 && (be16(x + 2) >> 3)) portless = 1;
        protocol = x[0];
        skipped += size;
      }
      transport += skipped;
      stats[FRAGMENTS] += portless;
    } else {
      stats[SHORT]++;
    }
  } else {
    stats[NON_IP]++;
  }
  if (!is_ip) {
    key->word[4] = (u64)255 << 56 | (u64)type << 40;
  } else {
    key->word[4] = (u64)protocol << 56;
    if ((protocol == 6 || protocol == 17 || protocol == 33 || protocol == 132) && !portless &&
        captured >= transport + 4) {
      u32 both = be32(p + transport);
      key->word[4] |= (u64)both << 24;
      if (protocol == 17 && (both & 0xffff) == 4791 && captured >= transport + 20) {
        const u8 *bth = p + transport + 8;
        key->word[4] |= be32(bth + 4) & 0xffffff;
        stats[bth[0] == 0x11 ? ROCE_ACK : bth[0] == 0x81 ? ROCE_CNP : ROCE_DATA]++;
      }
    }
    if (!ip_length) {
      stats[NO_IP_LENGTH]++;
      ip_length = length - network;
    }
  }
  if (layer == L2) return (u32)length;
  if (layer == WIRE) {
    i64 ethernet = length;
    if (link != 1 && (is_raw(link) || base)) ethernet = length - base + 14;
    return (u32)((ethernet < 60 ? 60 : ethernet) + 24);
  }
  if (layer == PAYLOAD && is_ip) {
    i64 header = 0;
    if (protocol == 17 && !portless) header = 8;
    if (protocol == 6 && !portless) {
      header = 20;
      if (captured >= transport + 13)
        header = (p[transport + 12] >> 4) * 4;
      else
        stats[CUT_TCP]++;
    }
    ip_length -= transport - network + header;
  }
  return is_ip && ip_length > 0 ? (u32)ip_length : 0;
}

static inline u64 mixed(const key_type *key) {
  u64 h = 0x9e3779b97f4a7c15ull;
  for (int i = 0; i < 5; i++) {
    h ^= key->word[i];
    h *= 0xbf58476d1ce4e5b9ull;
    h ^= h >> 31;
  }
  return h;
}

/* Numbers the frames' flows in order of first appearance and adds up their totals. Returns how many frames were
 * done: fewer than asked when the table is full. flow[i] is -1 where the cooked header says not wanted.
 * seen[0..1]: lowest and highest SLL2 interface index. */
i64 decode_frames(const u8 *data, const i64 *offset, const u32 *captured, const u32 *length, const i64 *time_ns,
                  u32 link, const u16 *links, i64 from, i64 count, int layer, i64 want_interface,
                  int want_direction, key_type *keys, i64 *known, i64 most_keys, int32_t *slots, i64 slot_count,
                  int32_t *flow, u32 *size, i64 *packets, i64 *bytes, i64 *first, i64 *last, i64 *stats,
                  i64 *seen) {
  u64 mask = (u64)slot_count - 1;
  i64 previous = -1;
  for (i64 i = from; i < count; i++) {
    if (*known >= most_keys) return i;
    const u8 *p = data + offset[i];
    u32 kind = links ? links[i] : link;
    key_type key;
    u32 bytes_here = decode_one(p, captured[i], length[i], kind, layer, &key, stats);
    size[i] = bytes_here;
    if (kind == 113 || kind == 276) {
      u32 direction;
      if (kind == 276) {
        i64 index = captured[i] >= 20 ? be32(p + 4) : 0;
        if (captured[i] >= 20) {
          if (index < seen[0]) seen[0] = index;
          if (index > seen[1]) seen[1] = index;
        }
        direction = p[10];
        if (want_interface >= 0 && index != want_interface) {
          flow[i] = -1;
          continue;
        }
      } else {
        direction = p[1];
      }
      if ((want_direction == OUT && direction != 4) || (want_direction == IN && direction == 4)) {
        flow[i] = -1;
        continue;
      }
    }
    i64 number = previous;
    if (number < 0 || memcmp(&keys[number], &key, sizeof key) != 0) {
      u64 slot = mixed(&key) & mask;
      while ((number = slots[slot]) >= 0 && memcmp(&keys[number], &key, sizeof key) != 0) slot = (slot + 1) & mask;
      if (number < 0) {
        number = (*known)++;
        keys[number] = key;
        slots[slot] = (int32_t)number;
      }
    }
    previous = number;
    flow[i] = (int32_t)number;
    packets[number]++;
    bytes[number] += bytes_here;
    if (time_ns[i] < first[number]) first[number] = time_ns[i];
    if (time_ns[i] > last[number]) last[number] = time_ns[i];
  }
  return count;
}

/* Puts `known` keys back into an emptied, larger table. */
void fill_slots(const key_type *keys, i64 known, int32_t *slots, i64 slot_count) {
  u64 mask = (u64)slot_count - 1;
  for (i64 number = 0; number < known; number++) {
    u64 slot = mixed(&keys[number]) & mask;
    while (slots[slot] >= 0) slot = (slot + 1) & mask;
    slots[slot] = (int32_t)number;
  }
}

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

/* Most bytes in any closed window [t[i], t[i] + tau], and the first i that has them. `reach` has room for one index
 * per block of 64: where the window of its first packet ends, which bounds all windows that start in the block
 * before it; only blocks whose bound is not below the best window found are opened. */
i64 window_maximum(const i64 *t, i64 n, i64 tau, const i64 *full, const u32 *size, const i64 *exact, i64 *reach,
                   i64 *where) {
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
  for (i64 b = 0; b < blocks; b++) {
    i64 first = b * BLOCK, stop = first + BLOCK < n ? first + BLOCK : n;
    i64 farthest = b + 1 < blocks ? reach[b + 1] : n;
    if (total(&sums, farthest) - total(&sums, first) < best) continue;
    high = reach[b];
    for (i64 part = first; part < stop; part += SUBBLOCK) {
      /* The same bound again for eight packets at a time. */
      i64 end = part + SUBBLOCK < stop ? part + SUBBLOCK : stop, next = farthest;
      while (high < n && t[high] - t[part] <= tau) high++;
      if (end < stop) {
        next = high;
        while (next < n && t[next] - t[end] <= tau) next++;
      }
      if (total(&sums, next) - total(&sums, part) >= best) {
        for (i64 i = part; i < end; i++) {
          while (high < n && t[high] - t[i] <= tau) high++;
          i64 w = total(&sums, high) - total(&sums, i);
          if (w > best || (w == best && i < *where)) {
            best = w;
            *where = i;
          }
        }
      }
      high = next > high ? next : high;
      if (end == stop) break;
    }
  }
  return best;
}

/* Most bytes in any bin [origin + k tau, origin + (k+1) tau). */
i64 binned_maximum(const i64 *t, const u32 *size, i64 n, i64 tau) {
  i64 best = 0, w = 0, edge = t[0] + tau;
  for (i64 i = 0; i < n; i++) {
    if (t[i] >= edge) {
      if (w > best) best = w;
      w = 0;
      edge = t[i] - (t[i] - t[0]) % tau + tau;
    }
    w += size[i];
  }
  return w > best ? w : best;
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

/* Insertion sort by time with sizes and flow numbers (width 0: none, 2 or 4 bytes) in step; stable. Gives up, all
 * columns still in step, once it has moved packets more than four times over. */
int sort_nearby(i64 *t, u32 *size, void *flow, int width, i64 n) {
  u16 *narrow = (u16 *)flow;
  u32 *wide = (u32 *)flow;
  i64 left = 4 * n + 1000;
  for (i64 i = 1; i < n; i++) {
    if (t[i] >= t[i - 1]) continue;
    i64 time = t[i], j = i;
    u32 bytes = size[i], number = width == 2 ? narrow[i] : width == 4 ? wide[i] : 0;
    while (j > 0 && t[j - 1] > time) {
      t[j] = t[j - 1];
      size[j] = size[j - 1];
      if (width == 2) narrow[j] = narrow[j - 1];
      else if (width == 4) wide[j] = wide[j - 1];
      j--;
    }
    t[j] = time;
    size[j] = bytes;
    if (width == 2) narrow[j] = (u16)number;
    else if (width == 4) wide[j] = number;
    left -= i - j;
    if (left < 0) return 0;
  }
  return 1;
}
