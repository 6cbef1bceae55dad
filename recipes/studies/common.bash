# What the scripts of the papers share, which read it first. What fails keeps nothing else from running: the script then
# ends with status 1. Interrupted, it stops.
set -euo pipefail
additional=${ADDITIONAL:-additional}  # the folder of the 17 further tasks, see docs/papers.md
glue_data=${GLUE:+--data_dir $GLUE}   # a folder with GLUE's files in place of the Hub's
squad_data=${SQUAD:+--data $SQUAD}    # the same for SQuAD
failed=0
trap 'status=$?; exit $((status ? status : failed))' EXIT
attempt() { "$@" || { [ $? -lt 128 ] || exit 130; failed=1; }; }
after() { [ -n "${DRY_RUN-}" ] || attempt "$@"; }  # what needs the runs
