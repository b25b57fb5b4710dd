# make book | test | execute | measure | lint | pdf | clean        (CONTRIBUTING.md says more)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-input -c constraints.txt

HTML := _build/html
# Whatever a page is made of. When nothing here is newer than the site, there is nothing to build.
SOURCES := $(shell find _config.yml _toc.yml references.bib _static chapters vendor -not -path '*/.*' 2>/dev/null)

.PHONY: help book test execute measure lint pdf chapter need-name clean distclean
.SUFFIXES:

help:
	@echo "make book                        build the site and print where it is"
	@echo "make test                        run the unit tests, then every chapter"
	@echo "make execute [CHAPTER=03]        run chapters and store their outputs"
	@echo "make measure NAME=training-step  measure on this machine's GPU into data/local/"
	@echo "make lint                        check code and notebooks"
	@echo "make pdf                         print the book to _build/book.pdf"
	@echo "make chapter NAME=05_topic TITLE=\"Topic\"   write a new chapter from the template"
	@echo "make clean | distclean           remove the built site | and the environment"
	@echo "PYTHON=python3.12 make …         choose the interpreter when .venv is first made"

# --- the environment: made once, brought up to date when a requirements file changes ----------------

# Each missing prerequisite stops here, in one line.
python_ok = $(shell $(PYTHON) -c 'import sys; print(int(sys.version_info >= (3, 10)))' 2>/dev/null)
venv_ok = $(shell $(PYTHON) -c 'import ensurepip, venv; print(1)' 2>/dev/null)
compiler_ok = $(shell command -v $(firstword $(CXX)) 2>/dev/null)

$(BIN)/python:
	$(if $(python_ok),,$(error '$(PYTHON)' is not a Python: install Python 3.10 or newer, or name one with PYTHON=))
	$(if $(filter 1,$(python_ok)),,$(error '$(PYTHON)' is too old: Python 3.10 or newer is needed, name one with PYTHON=))
	$(if $(venv_ok),,$(error '$(PYTHON)' lacks venv or pip: install them (Debian: apt-get install python3-venv)))
	@echo "== environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/book-installed: requirements-book.txt constraints.txt | $(BIN)/python
	@echo "== packages of the site"
	@$(PIP) -r requirements-book.txt
	@touch $@

$(VENV)/all-installed: requirements.txt requirements-book.txt constraints.txt pyproject.toml | $(BIN)/python
	$(if $(compiler_ok),,$(error no C++ compiler '$(CXX)': install one (Debian: apt-get install g++), or name one with CXX=))
	@echo "== packages of the site, the package utils and the tests"
	@$(PIP) -r requirements.txt
	@touch $(VENV)/book-installed $@

# --- what to do -------------------------------------------------------------------------------------

book: $(HTML)/.complete
	@echo "the book: $(CURDIR)/$(HTML)/index.html"

# The build starts from nothing, so that a page is as strict the second time as the first: Sphinx would not
# repeat the warnings of a page that has not changed.
$(HTML)/.complete: $(SOURCES) $(VENV)/book-installed
	@rm -rf $(HTML) _build/.doctrees
	$(BIN)/jupyter-book build . -W -n --keep-going
	@test -f $(HTML)/index.html
	@touch $@

test: $(VENV)/all-installed
	$(BIN)/python -m pytest tests/
	$(BIN)/python -m pytest --nbval chapters/

execute: $(VENV)/all-installed
	@$(BIN)/python -m tools.execute $(CHAPTER)

measure: | need-name $(VENV)/all-installed
	@$(BIN)/python -m utils measure $(NAME) $(ARGS)

lint: $(VENV)/all-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.lint

pdf: $(HTML)/.complete
	@$(BIN)/python -m tools.pdf

chapter: | need-name $(VENV)/all-installed
	@$(BIN)/python -m tools.new_chapter "$(NAME)" "$(TITLE)"

need-name:
	$(if $(NAME),,$(error NAME is missing, for example: make measure NAME=training-step, make chapter NAME=05_topic))
	@:

clean:
	rm -rf _build .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) *.egg-info
