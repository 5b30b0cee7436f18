"""Reading captures: bytes of a file become time stamps, lengths and flows, and nothing is believed unchecked.

`source` opens and decompresses, `pcap` and `pcapng` find the records, `headers` decodes them, `reader` puts a
trace together. Nothing here computes a metric.
"""
