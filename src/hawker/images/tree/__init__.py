"""Layers as trees of files: unpacked so that overlayfs shows their image, packed again, and archives of whole images.

- `unpacking`: `unpack` a layer in a confined process, `merge` its tree on those below, `remove`, `sweep`.
- `pack`: a directory becomes a layer.
- `archive`: images in tars and directories, as `docker save`, `skopeo` and `tar` make them.

What runs in the confined process (`child`, `confine`, `streams`, `headers`, `extract`, `merging`) imports the standard
library alone, and little of it, because it starts with every layer.
"""
