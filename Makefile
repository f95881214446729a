# `make demo` shows the main job, `make test` passes the tests. Both set up what they need.

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)

# Mesa's device-select layer asks for a display and complains where there is none; we order devices ourselves.
export NODEVICE_SELECT := 1

# A minimal toolchain has neither rustfmt nor clippy: said, not failed. Continuous integration (CI=true) needs both.
with = if cargo $(1) --version >/dev/null 2>&1 || [ -n "$$CI" ]; then echo '$(2)'; $(2); \
	else echo 'skipped: cargo $(1) is not installed'; fi

# The feature, where Open MPI is there or can be installed. Asked once, by the targets that need it.
MPI = $(eval MPI := $$(shell sh scripts/setup-mpi.sh >&2 && echo --features mpi))$(MPI)

.PHONY: help demo demo-full test test-portability web check release devices bench

help:
	@echo 'make demo       six prompts, base and four adapters, thirty sequences in one batch'
	@echo 'make demo-full  the same on every tier, all 640 answers, and 25 perplexities against the references'
	@echo 'make test       formatting, lints, tests, doc tests, documentation, build without the command line'
	@echo 'make test-portability   what this Linux machine can show about other systems; writes docs/PORTABILITY.md'
	@echo 'make web        serves a page that runs a layer in your browser, through WebGPU'
	@echo 'make check      the part of make test that needs no GPU and runs nothing'
	@echo 'make devices    the GPUs of this machine, with driver and limits'
	@echo 'make bench      benchmarks of loading, attention, a layer, a model, and the demonstration model'

demo: release
	@$(TARGET)/release/wgmoe demo --dir examples/demo

demo-full: release
	@$(TARGET)/release/wgmoe demo --dir examples/demo --full --all-tiers

bench: release
	cargo bench --locked
	@$(TARGET)/release/wgmoe bench layer
	@$(TARGET)/release/wgmoe bench model

# The program, and a device to run it on.
release:
	cargo build --release --locked --bin wgmoe
	@sh scripts/setup-vulkan.sh $(TARGET)/release/wgmoe

# The tests' own build of the program, so that the dependencies are not compiled once more in another profile.
devices:
	cargo test --locked $(MPI) --no-run
	@sh scripts/setup-vulkan.sh $(TARGET)/debug/wgmoe
	@$(TARGET)/debug/wgmoe devices

# Minutes, and packages from Debian, npm and PyPI. Needs what is in portability/ and nothing of `make test`.
test-portability:
	@bash portability/run.sh

web:
	WGMOE_TRACE=examples/web/layer.json cargo test --locked --test trace
	python3 -m http.server --bind 127.0.0.1 --directory examples/web 8000

check:
	@$(call with,fmt,cargo fmt --check)
	@$(call with,clippy,cargo clippy --locked --all-targets $(MPI) -- -D warnings)
	cargo check --locked --no-default-features

# Ranks as processes are tested where there is MPI, or where it can be installed; on Linux continuous integration needs it.
test: devices check
	@[ -n '$(MPI)' ] || [ -z "$$CI" ] || [ "$$(uname -s)" != Linux ]
	cargo test --locked $(MPI) --lib --bins --tests
	cargo test --locked $(MPI) --doc
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps
