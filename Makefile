# Everything lives in .venv inside the checkout; each target may be run again at no cost.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install serve test test-deep check bench clean

install: .venv/.installed

.venv/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@echo "installing tailrace into .venv (about 300 MB the first time)"
	@$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

serve: install
	@$(BIN)/tailrace serve $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three at once, since many of them wait; each with whole files: what a file sets up is set up once. Tests have their
# own limits, which do not reach into a library that hangs: such a process ends here, and says where it was.
test: install
	$(BIN)/pytest -n 3 --dist loadfile -m "not deep" -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true $(ARGS)

test-deep: install
	$(BIN)/pytest $(ARGS)

bench: install
	$(BIN)/tailrace bench $(ARGS)

clean:
	rm -rf .venv dist
