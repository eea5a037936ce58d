#!/bin/bash
set -e
cd /app
find downloads -type f -printf '%f\t%p\n' | LC_ALL=C sort | while IFS=$'\t' read -r name path; do
    sum=$(sha256sum < "$path")
    if grep -qsF "$sum" /tmp/seen; then rm -- "$path"; continue; fi
    echo "$sum" >> /tmp/seen
    case $name in *.*) folder=${name##*.}; folder=${folder,,} ;; *) folder=other ;; esac
    mkdir -p "sorted/$folder"
    mv -- "$path" "sorted/$folder/$name"
done
cd sorted
find . -type f ! -name index.txt -printf '%P\n' | LC_ALL=C sort | while read -r path; do
    printf '%s  %s\n' "$(sha256sum < "$path" | cut -d' ' -f1)" "$path"
done > index.txt
