"""Files that hold captions: sidecars beside images, and files for many images. Stages import it; it imports no stage."""
