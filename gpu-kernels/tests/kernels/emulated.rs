//! The kernels' own source on a CPU: see `tests/emulator/emulator.hpp`. Host code is the same as for a GPU.

use flexcomm_gpu_kernels::{Device, LaunchError, Outcome, Span, THREADS, source};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

type Emulate = unsafe extern "C" fn(*const c_char, u32, u32, *mut *mut c_void, u32, u64, u32) -> c_int;

struct Emulator {
    library: libloading::Library,
    /// It has one state: one run at a time.
    turn: Mutex<()>,
}

/// Compiled by g++ when the first test asks; None, said, where there is no g++.
fn emulator() -> Option<&'static Emulator> {
    static ONE: OnceLock<Option<Emulator>> = OnceLock::new();
    ONE.get_or_init(|| {
        let built = build();
        if let Err(why) = &built {
            let may = std::env::var_os("FLEXCOMM_NO_SKIP").is_none_or(|v| v != "1");
            assert!(may, "emulating kernels may not be skipped here: {why}");
            eprintln!("SKIPPED emulating kernels: {why}");
        }
        built.ok()
    })
    .as_ref()
}

fn build() -> Result<Emulator, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("emulator-{}.so", std::process::id()));
    let flags =
        "-std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -Wall -Wno-unknown-pragmas -Werror -shared -fPIC";
    let mut compiler = Command::new("g++");
    compiler.args(flags.split(' ')).arg("-DFLEXCOMM_EMULATOR");
    compiler.arg("-I").arg(root.join("cuda")).arg("-I").arg(root.join("tests/emulator"));
    compiler.arg(root.join("tests/emulator/emulator.cpp")).arg("-o").arg(&to);
    let output = compiler.output().map_err(|why| format!("there is no g++ ({why}): apt-get install g++"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: our own code, built a moment ago.
    let library = unsafe { libloading::Library::new(&to) }.map_err(|why| why.to_string())?;
    drop(std::fs::remove_file(&to));
    Ok(Emulator { library, turn: Mutex::new(()) })
}

/// A device of the emulator; `seed` decides who goes first, wherever CUDA does not say it.
pub struct Emulated {
    emulator: &'static Emulator,
    seed: u64,
    blocks: u32,
}

impl Emulated {
    pub fn new(seed: u64) -> Option<Self> {
        // From one block alone to more than run at a time.
        emulator().map(|emulator| Self { emulator, seed, blocks: [1, 3, 7, 16][seed as usize % 4] })
    }

    fn run(&self, kernel: &str, (blocks, threads): (u32, u32), arguments: &[u64]) -> c_int {
        let _turn = self.emulator.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let name = CString::new(kernel).unwrap();
        let mut pointers: Vec<*mut c_void> =
            arguments.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast()).collect();
        let resident = 1 + (self.seed % 3) as u32;
        // SAFETY: the signature is that of emulator.cpp; addresses are of buffers that outlive the call.
        unsafe {
            let emulate = self.emulator.library.get::<Emulate>(b"emulate").unwrap();
            emulate(name.as_ptr(), blocks, threads, pointers.as_mut_ptr(), arguments.len() as u32, self.seed, resident)
        }
    }
}

impl Device for Emulated {
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError> {
        match self.run(kernel, (blocks, THREADS), arguments) {
            0 => Ok(()),
            1 => Err(LaunchError::Driver { kernel, code: "no such kernel".into() }),
            _ => Err(LaunchError::Driver { kernel, code: "another number of arguments".into() }),
        }
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        // SAFETY: spans of these tests are parts of buffers that live.
        unsafe { std::ptr::write_bytes(span.address() as *mut u8, 0, span.bytes() as usize) };
        Ok(())
    }

    fn blocks(&self) -> u32 {
        self.blocks
    }
}

/// Memory of the "device" between guards that nobody may touch. What it holds at first is garbage.
pub struct Memory {
    words: Vec<u64>,
    bytes: usize,
}

const GUARD: usize = 64;
const GARBAGE: u64 = 0xa5a5_a5a5_a5a5_a5a5;

impl Memory {
    pub fn new(bytes: u64) -> Self {
        let bytes = bytes as usize;
        // Room to begin at a multiple of 256.
        Self { words: vec![GARBAGE; bytes.div_ceil(8) + 2 * GUARD + 32], bytes }
    }

    pub fn of<T: Copy>(values: &[T]) -> Self {
        let mut memory = Self::new(size_of_val(values) as u64);
        let to = memory.start().cast_mut().cast::<T>();
        // SAFETY: there is room for just these.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len()) };
        memory.words[0] = GARBAGE;
        memory
    }

    fn start(&self) -> *const u8 {
        let first = self.words[GUARD..].as_ptr().cast::<u8>();
        first.wrapping_add(first.align_offset(256))
    }

    pub fn span(&self) -> Span {
        // SAFETY: emulated kernels run while this is borrowed by the test.
        unsafe { Span::new(self.start() as u64, self.bytes as u64) }
    }

    /// What it holds; checks the guards.
    pub fn bytes(&self) -> Vec<u8> {
        let base = self.words.as_ptr().cast::<u8>();
        let at = self.start() as usize - base as usize;
        // SAFETY: all of the vector.
        let all = unsafe { std::slice::from_raw_parts(base, 8 * self.words.len()) };
        assert!(all[..at].iter().all(|b| *b == 0xa5), "written in front of the buffer");
        assert!(all[at + self.bytes..].iter().all(|b| *b == 0xa5), "written behind the buffer");
        all[at..at + self.bytes].to_vec()
    }

    pub fn f32s(&self) -> Vec<f32> {
        self.u32s().into_iter().map(f32::from_bits).collect()
    }

    pub fn u32s(&self) -> Vec<u32> {
        self.bytes().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    pub fn outcome(&self) -> Outcome {
        Outcome::read(self.bytes()[..flexcomm_gpu_kernels::OUTCOME_BYTES as usize].try_into().unwrap())
    }
}

#[test]
fn the_emulator_has_every_kernel_and_the_sizes_that_the_host_lays_out() {
    let Some(device) = Emulated::new(0) else { return };
    for kernel in source::MODULES.iter().flat_map(|module| module.kernels) {
        assert_eq!(device.run(kernel, (1, THREADS), &[0; 0]), 2, "{kernel} is not in emulator/kernels.hpp");
    }
    let mut sizes = [0u64; 5];
    // SAFETY: the signature is that of emulator.cpp.
    unsafe {
        let of = device.emulator.library.get::<unsafe extern "C" fn(*mut u64)>(b"emulator_sizes").unwrap();
        of(sizes.as_mut_ptr());
    }
    assert_eq!(sizes, flexcomm_gpu_kernels::STRUCTURES);
}
