"""The rotations of OrthoAdam: a file's name is its rotation's name, in `base` a class's."""
