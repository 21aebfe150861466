"""Reading of image files and masks, for every stage of this pipeline that opens images."""
