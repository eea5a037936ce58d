# A repository whose newest work was reset away, while a colleague's went on.
set -e
export GIT_AUTHOR_DATE=2024-05-01T10:00:00Z GIT_COMMITTER_DATE=2024-05-01T10:00:00Z
git init -q -b main /app/site
cd /app/site
git config user.name "Ada"
git config user.email "ada@example.org"
git config gc.auto 0
mkdir pages
printf '# Home\n\nWelcome.\n' > pages/home.md
printf 'title: Site\ntheme: light\n' > config.yml
git add -A
git commit -q -m "First pages"
printf '# About\n\nWe are three.\n' > pages/about.md
printf 'title: Site\ntheme: dark\n' > config.yml
git add -A
git commit -q -m "About page and dark theme"
git reset -q --hard HEAD~1
printf 'title: Our site\ntheme: light\n' > config.yml
git commit -q -a -m "A better title"
