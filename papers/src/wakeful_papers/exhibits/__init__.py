"""The papers' exhibits as data, what they measure, and how their claims are judged."""
