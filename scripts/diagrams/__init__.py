"""The drawings of docs/diagrams, which scripts/draw_diagrams.py writes."""
