"""Files that hold captions: sidecars beside images, and files for many images."""
