"""Parts in one file each, which import nothing but torch: copy them, or import them from here."""
