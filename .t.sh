cd /work/wt/episodes; OMP_NUM_THREADS=1 nice -n 10 .venv/bin/python -m pytest -x -q "$@"
