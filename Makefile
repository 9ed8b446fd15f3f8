# Everything lives in .venv inside the checkout; each target may be run again at no cost.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install install-dev page serve demo test simulate coverage check-versions test-deep check site bench release clean

# What serving needs. pip is not quiet: it shows what it downloads, and how far it is. Python compiles what it imports when
# it imports it: compiling every module of every package beforehand takes 5 s more of a processor.
install: .venv/.installed

.venv/.installed: pyproject.toml hatch_build.py
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing tailrace into .venv: about 153 MB to download, 525 MB on disk."
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable .
	@touch $@

# What the tests and checks need as well: other engines, clients, a browser's driver.
install-dev: .venv/.installed-dev page

.venv/.installed-dev: .venv/.installed
	@echo "Installing what the tests need into .venv: 2.7 GB on disk, which takes minutes."
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --editable . --group dev
	@touch $@

# The libraries of the page, which come from npm's registry. Without it, tailrace works without its page, and the next run tries
# again.
page: install
	@$(BIN)/python scripts/page_libraries.py || true

serve: install page
	@$(BIN)/tailrace serve $(ARGS)

demo: install page
	@$(BIN)/tailrace demo $(ARGS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.site

# The docs as a site, in site/html. Broken links and pages without a menu are errors. It takes seconds.
site: install-dev
	$(BIN)/python -m scripts.site

# Five at once, since many of them wait; each with whole files: what a file sets up is set up once. Files come in the order of
# their names, the short ones last: tests/scheduler.py. Tests have their own limits, which do not reach into a library that hangs: such a
# process ends here, and says where it was.
# A test that fails runs once more, since thousands of tests of processes and sockets meet what a busy machine does once in
# a while, and one of them would refuse a change that has nothing to do with it. Such a test is a defect all the same, which
# the end of the run shows. Not so what hung, and not more than five tests: that is no accident. `test-deep` tries once.
TRIES := --reruns 1 --max-suite-reruns 5 --rerun-except "from pytest-timeout" --rerun-show-tracebacks
test: install-dev
	$(BIN)/pytest -n 5 --dist loadfile --no-loadscope-reorder $(TRIES) -m "not deep" \
		-o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true $(ARGS)

# Servers that share a Redis, with faults that nobody has thought of, for a minute: docs/reliability.md. It prints the seed of
# a schedule that breaks a law; `make simulate ARGS="--seed N"` runs that one again.
SECONDS ?= 60
simulate: install-dev
	$(BIN)/python -m tests.simulation --seconds $(SECONDS) $(ARGS)

# Line coverage of the packages that tests call in their own process, with a floor for all (pyproject.toml) and one for each
# package (scripts/coverage_floors.py). It is no part of `test`:
# Python 3.11 traces every line, which makes these tests take 1.8 times the processor time, and the other tests mostly
# wait for servers, which run in processes that are not measured. From 3.12 on COVERAGE_CORE=sysmon takes an eighth more instead.
# The tests of `models` would be measured, too, but take 38 s of a processor; those of the other packages wait for servers.
COVERED := $(addprefix tests/,access admission conversations dialects generation responses \
	$(addprefix plugins/,anthropic articles durable_streams foreign_chats front_ends llama_server ollama tei tgi triton) \
	images packages records redis schemas streams text \
	engines/test_schedule.py kit/test_adapters.py system/test_file_systems.py \
	$(addprefix test_,errors.py types.py wording.py))

coverage: install-dev
	$(BIN)/pytest -n 4 --dist loadfile $(TRIES) -m "not deep" --cov --cov-report=term $(COVERED) $(ARGS)
	$(BIN)/python -m scripts.coverage_floors

# The tests of what depends on libraries, with their lowest and their newest releases, and on each Python of this machine. It
# is no part of `test`: each environment takes minutes. `make check-versions ARGS="--resolution highest tests/transport"`
check-versions: install-dev
	$(BIN)/python -m scripts.check_versions $(ARGS)

# Here each server is started as users start it; in `test` most are forks, which need half the processor time: tests/api/forks.py.
test-deep: install-dev
	TESTS_FORK=0 $(BIN)/pytest $(ARGS)

# Wheel and sdist, each installed into a new environment, and the first token out of it. `make release VERSION=0.2.0` raises
# the version and the changelog first.
release: install-dev
	$(BIN)/python -m scripts.release $(VERSION)

bench: install
	$(BIN)/tailrace bench $(ARGS)

clean:
	rm -rf .venv .versions dist site
