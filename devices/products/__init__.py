"""Matrix products by weights in blocks with torch: plain, packed and coded ones, and how many cores they run on."""
