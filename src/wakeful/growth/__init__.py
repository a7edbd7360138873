"""Smaller models from larger ones: inherit blocks, train, grow (When Attention Collapses)."""
