#!/bin/sh
# Runs every target for $1 seconds (600 if not given), one after the other; stops at the first finding.
set -eu
cd "$(dirname "$0")"
seconds=${1:-600}
for target in fuzz_targets/*.rs; do
    name=$(basename "$target" .rs)
    [ "$name" = shared ] && continue
    mkdir -p "corpus/$name"
    seeds=seeds/$name
    case $name in
    message_v2) seeds=../tests/golden/v2 ;;
    esac
    [ -d "$seeds" ] || seeds=
    echo "== $name, $seconds s"
    cargo +nightly fuzz run --fuzz-dir . "$name" "corpus/$name" $seeds -- \
        -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1
done
