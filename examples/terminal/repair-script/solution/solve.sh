#!/bin/bash
cat > /app/rotate.sh <<'SCRIPT'
#!/bin/bash
folder=$1 keep=$2
[[ -d $folder && $keep =~ ^[1-9][0-9]*$ ]] || exit 2
shopt -s nullglob
for log in "$folder"/*.log; do
    [[ -s $log ]] || continue
    for old in "$log".*; do
        n=${old##*.}
        if [[ $n =~ ^[0-9]+$ ]] && ((n >= keep)); then rm -f -- "$old"; fi
    done
    for ((i = keep - 1; i >= 1; i--)); do
        if [[ -f $log.$i ]]; then mv -- "$log.$i" "$log.$((i + 1))"; fi
    done
    mv -- "$log" "$log.1"
    : > "$log"
done
exit 0
SCRIPT
