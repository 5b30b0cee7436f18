"""The commands of `mlfabric`, one module each; they parse and print, the library does the work."""
