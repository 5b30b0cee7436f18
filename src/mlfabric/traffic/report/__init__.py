"""Pictures of an analysis: one self-contained HTML file, or PNG charts. Draws; computes nothing new but
series."""
