"""The demo: a real small classifier, trained by eight processes on this machine over TCP."""
