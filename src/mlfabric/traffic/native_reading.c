/* The compiled form of what NumPy does in capture/: records, headers, flows, order.
 *
 * Same results, required by tests; built on demand by native.py, never needed. Plain C99, no state of its own:
 * every array belongs to the caller. */
#include <string.h>

#include "native_types.h"

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

/* Flows of frames of the common kind by two words, as capture/plain.py tells them: what is found here needs no key. */
#define RECENT_BITS 8
typedef struct {
  u64 first, second;
  i64 number;
} recent_type;

/* Whether a frame is Ethernet, IPv4 without options, TCP or UDP, no later fragment, no RoCE; its two words then. */
static inline int is_plain(const u8 *p, i64 captured, u32 link, int layer, u64 *first, u64 *second) {
  u64 head, middle, third, fourth;
  if (__BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || link != 1 || captured < 38 || layer == PAYLOAD) return 0;
  memcpy(&head, p + 8, 8);
  memcpy(&middle, p + 16, 8);
  memcpy(&third, p + 24, 8);
  memcpy(&fourth, p + 32, 8);
  if ((head >> 32 & 0xffffff) != 0x450008 || (middle >> 32 & 0xff1f) || !(middle & 0xffff)) return 0;
  u64 protocol = middle >> 56;
  *second = fourth & 0xffffffffffffull;
  if (protocol != 6 && (protocol != 17 || *second >> 32 == 0xb712)) return 0;
  *first = (third & ~(u64)0xffff) | protocol;
  return 1;
}

static inline u32 plain_size(const u8 *p, u32 length, int layer) {
  if (layer == L2) return length;
  return layer == IP ? be16(p + 16) : (length < 60 ? 60 : length) + 24;
}

/* Whether the cooked header names the wanted interface and direction. seen[0..1]: lowest and highest SLL2 interface
 * index. */
static int is_wanted(const u8 *p, u32 captured, u32 link, i64 want_interface, int want_direction, i64 *seen) {
  u32 direction = p[1];
  if (link == 276) {
    i64 index = captured >= 20 ? be32(p + 4) : 0;
    if (captured >= 20) {
      if (index < seen[0]) seen[0] = index;
      if (index > seen[1]) seen[1] = index;
    }
    direction = p[10];
    if (want_interface >= 0 && index != want_interface) return 0;
  }
  return !((want_direction == OUT && direction != 4) || (want_direction == IN && direction == 4));
}

/* Every distinct key and its number, by open addressing. */
typedef struct {
  key_type *keys;
  i64 *known;
  int32_t *slots;
  u64 mask;
} flows_type;

static i64 flow_number(const flows_type *flows, const key_type *key) {
  u64 slot = mixed(key) & flows->mask;
  i64 number;
  while ((number = flows->slots[slot]) >= 0 && memcmp(&flows->keys[number], key, sizeof *key) != 0)
    slot = (slot + 1) & flows->mask;
  if (number < 0) {
    number = (*flows->known)++;
    flows->keys[number] = *key;
    flows->slots[slot] = (int32_t)number;
  }
  return number;
}

/* Numbers the frames' flows in order of first appearance and adds up their totals. Returns how many frames were
 * done: fewer than asked when the table is full. flow[i] is -1 where the cooked header says not wanted. */
i64 decode_frames(const u8 *data, const i64 *offset, const u32 *captured, const u32 *length, const i64 *time_ns,
                  u32 link, const u16 *links, i64 from, i64 count, int layer, i64 want_interface,
                  int want_direction, key_type *keys, i64 *known, i64 most_keys, int32_t *slots, i64 slot_count,
                  int32_t *flow, u32 *size, i64 *packets, i64 *bytes, i64 *first, i64 *last, i64 *stats,
                  i64 *seen) {
  flows_type flows = {keys, known, slots, (u64)slot_count - 1};
  recent_type recent[1 << RECENT_BITS];
  memset(recent, 0, sizeof recent);
  for (i64 i = from; i < count; i++) {
    if (*known >= most_keys) return i;
    const u8 *p = data + offset[i];
    u32 kind = links ? links[i] : link;
    u64 one = 0, two = 0;
    recent_type *place = NULL;
    i64 number = -1;
    if (is_plain(p, captured[i], kind, layer, &one, &two)) {
      place = &recent[(one * 0x9e3779b97f4a7c15ull ^ two * 0xbf58476d1ce4e5b9ull) >> (64 - RECENT_BITS)];
      if (place->first == one && place->second == two) number = place->number;
    }
    if (number >= 0) {
      size[i] = plain_size(p, length[i], layer);
    } else {
      key_type key;
      size[i] = decode_one(p, captured[i], length[i], kind, layer, &key, stats);
      if ((kind == 113 || kind == 276) && !is_wanted(p, captured[i], kind, want_interface, want_direction, seen)) {
        flow[i] = -1;
        continue;
      }
      number = flow_number(&flows, &key);
      if (place) *place = (recent_type){one, two, number};
    }
    flow[i] = (int32_t)number;
    packets[number]++;
    bytes[number] += size[i];
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
