#!/bin/bash
set -e
cd /app/site
lost=$(git reflog --format='%h %gs' | grep 'About page and dark theme' | head -n 1 | cut -d' ' -f1)
git cherry-pick "$lost" || true
printf 'title: Our site\ntheme: dark\n' > config.yml
git add -A
git -c core.editor=true cherry-pick --continue
