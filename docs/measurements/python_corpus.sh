#!/usr/bin/env bash
# A corpus in data/corpus: the Python sources of the machine, with a vocabulary of 8,192. Does nothing where it exists.
#   [WORKERS=32] docs/measurements/python_corpus.sh LOG
set -uo pipefail
log=$1
[[ ! -e data/corpus/text.idx ]] || exit 0
python3 - <<'PY'
import pathlib, random, site, sysconfig
folders = [sysconfig.get_path("stdlib"), *site.getsitepackages()]
files = sorted({str(p) for f in folders for p in pathlib.Path(f).rglob("*.py") if p.stat().st_size > 200})
random.Random(0).shuffle(files)
pathlib.Path("data/corpus").mkdir(parents=True, exist_ok=True)
pathlib.Path("data/corpus/files.txt").write_text("\n".join(files) + "\n")
pathlib.Path("data/corpus/some.txt").write_text("\n".join(files[:1500]) + "\n")
PY
python3 tools/train_tokenizer.py --text-files --input-list data/corpus/some.txt --output data/corpus/tokenizer.model --vocab-size 8192 --overwrite >"$log" 2>&1
python3 tools/preprocess_data.py --text-files --input-list data/corpus/files.txt --tokenizer sentencepiece --tokenizer-path data/corpus/tokenizer.model \
    --output-prefix data/corpus/text --workers "${WORKERS:-32}" --skip-errors --overwrite >>"$log" 2>&1 || tail -n 5 "$log"
grep -a "tokens" "$log" | tail -n 1 | tr '\r' '\n' | tail -n 1
