//! The kernels' own source on a CPU: see `tests/emulator/emulator.hpp`. Host code is the same as for a GPU; with
//! `FLEXCOMM_TEST_GPU=1` everything here runs on one instead (for compute-sanitizer too).

#[path = "../../../tests/skipped.rs"]
pub mod skipped;

use flexcomm_gpu_kernels::{
    Allocation, Blas, Copies, Cublas, Device, Gemm, Gpu, LaunchError, Outcome, Sgemm, Span, THREADS, source,
};
use skipped::skipped;
use std::collections::BTreeMap;
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
            skipped(&format!("the kernels' emulator is not there: {why}"));
        }
        built.ok()
    })
    .as_ref()
}

fn build() -> Result<Emulator, String> {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("emulator-{}.so", std::process::id()));
    compile("emulator.cpp", &to)?;
    // SAFETY: our own code, built a moment ago.
    let library = unsafe { libloading::Library::new(&to) }.map_err(|why| why.to_string())?;
    drop(std::fs::remove_file(&to));
    Ok(Emulator { library, turn: Mutex::new(()) })
}

/// A file of `tests/emulator` to a library.
pub fn compile(source: &str, to: &Path) -> Result<(), String> {
    // Other crates' tests use this file too.
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join("gpu-kernels"));
    let root = above.find(|folder| folder.join("cuda").exists()).ok_or("gpu-kernels/ is not here")?;
    let flags =
        "-std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -Wall -Wno-unknown-pragmas -Werror -shared -fPIC";
    // A GPU faults at a misaligned access, where this machine would go on: trap.
    let strict = "-fsanitize=alignment -fsanitize-undefined-trap-on-error";
    let mut compiler = Command::new("g++");
    compiler.args(flags.split(' ')).args(strict.split(' ')).arg("-DFLEXCOMM_EMULATOR");
    compiler.arg("-I").arg(root.join("cuda")).arg("-I").arg(root.join("tests/emulator"));
    compiler.arg(root.join("tests/emulator").join(source)).arg("-o").arg(to);
    let output = compiler.output().map_err(|why| format!("there is no g++ ({why}): apt-get install g++"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// With `FLEXCOMM_TEST_GPU=1` the same tests run on the first GPU.
pub fn gpu() -> Option<&'static Gpu> {
    static ONE: OnceLock<Option<Gpu>> = OnceLock::new();
    let asked = || std::env::var_os("FLEXCOMM_TEST_GPU").is_some_and(|v| v == "1");
    ONE.get_or_init(|| asked().then(|| Gpu::load(0, None).unwrap_or_else(|why| panic!("failed to {why}")))).as_ref()
}

/// Whether these tests run on a GPU.
pub fn on_gpu() -> bool {
    gpu().is_some()
}

/// A device of the emulator; `seed` decides who goes first, wherever CUDA does not say it. Or a GPU.
pub struct Emulated {
    on: On,
    seed: u64,
    blocks: u32,
    /// Of each kernel's last launch, on one word.
    atomics: Mutex<BTreeMap<&'static str, u32>>,
}

enum On {
    Emulator(&'static Emulator),
    Gpu(&'static Gpu),
}

impl Emulated {
    pub fn new(seed: u64) -> Option<Self> {
        // From one block alone to more than run at a time.
        let blocks = [1, 3, 7, 16][seed as usize % 4];
        let on = match gpu() {
            Some(gpu) => On::Gpu(gpu),
            None => On::Emulator(emulator()?),
        };
        Some(Self { on, seed, blocks, atomics: Mutex::default() })
    }

    /// Atomics of a kernel's last launch on one word of the device's memory, which wait for each other; None on a GPU.
    pub fn most_atomics(&self, kernel: &str) -> Option<u32> {
        self.atomics.lock().unwrap_or_else(PoisonError::into_inner).get(kernel).copied()
    }
}

impl Emulator {
    /// Its status, and most atomics on one word of the device's memory.
    fn run(&self, kernel: &str, (blocks, seed): (u32, u64), arguments: &[u64]) -> (c_int, u32) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let name = CString::new(kernel).unwrap();
        let mut pointers: Vec<*mut c_void> =
            arguments.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast()).collect();
        let resident = 1 + (seed % 3) as u32;
        // SAFETY: the signature is that of emulator.cpp; addresses are of buffers that outlive the call.
        unsafe {
            let emulate = self.library.get::<Emulate>(b"emulate").unwrap();
            let status =
                emulate(name.as_ptr(), blocks, THREADS, pointers.as_mut_ptr(), arguments.len() as u32, seed, resident);
            let most = self.library.get::<unsafe extern "C" fn() -> u32>(b"emulator_most_atomics").unwrap();
            (status, most())
        }
    }
}

/// Waits, so that what a kernel does wrong is found at its launch.
fn finish(gpu: &Gpu, kernel: &'static str) -> Result<(), LaunchError> {
    gpu.wait().map_err(|why| LaunchError::Driver { kernel, code: why.to_string() })
}

impl Device for Emulated {
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError> {
        let emulator = match &self.on {
            On::Emulator(emulator) => emulator,
            On::Gpu(gpu) => {
                // SAFETY: the default stream is always there.
                unsafe { gpu.on(0) }.launch(kernel, blocks, arguments)?;
                return finish(gpu, kernel);
            }
        };
        let (status, atomics) = emulator.run(kernel, (blocks, self.seed), arguments);
        self.atomics.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel, atomics);
        match status {
            0 => Ok(()),
            1 => Err(LaunchError::Driver { kernel, code: "no such kernel".into() }),
            _ => Err(LaunchError::Driver { kernel, code: "another number of arguments".into() }),
        }
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        if let On::Gpu(gpu) = self.on {
            // SAFETY: the default stream is always there.
            unsafe { gpu.on(0) }.zero(span)?;
            return finish(gpu, "memset");
        }
        // SAFETY: spans of these tests are parts of buffers that live.
        unsafe { std::ptr::write_bytes(span.address() as *mut u8, 0, span.bytes() as usize) };
        Ok(())
    }

    fn copy(&self, to: Span, from: Span) -> Result<(), LaunchError> {
        if let On::Gpu(gpu) = self.on {
            // SAFETY: the default stream is always there.
            unsafe { gpu.on(0) }.copy(to, from)?;
            return finish(gpu, "memcpy");
        }
        if to.bytes() != from.bytes() {
            return Err(LaunchError::Lengths { from: from.bytes(), to: to.bytes() });
        }
        // SAFETY: spans of these tests are parts of buffers that live.
        unsafe { std::ptr::copy(from.address() as *const u8, to.address() as *mut u8, from.bytes() as usize) };
        Ok(())
    }

    fn blocks(&self, kernel: &'static str) -> u32 {
        match self.on {
            On::Emulator(_) => self.blocks,
            // As many as a training process launches.
            // SAFETY: the default stream is always there.
            On::Gpu(gpu) => unsafe { gpu.on(0) }.blocks(kernel),
        }
    }
}

impl Copies for Emulated {
    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), LaunchError> {
        if let On::Gpu(gpu) = self.on {
            // SAFETY: the default stream is always there.
            unsafe { gpu.on(0) }.upload(to, bytes)?;
            return finish(gpu, "memcpy");
        }
        assert_eq!(to.bytes(), bytes.len() as u64);
        // SAFETY: spans of these tests are parts of buffers that live.
        unsafe { std::ptr::copy(bytes.as_ptr(), to.address() as *mut u8, bytes.len()) };
        Ok(())
    }

    fn download(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        if let On::Gpu(gpu) = self.on {
            // SAFETY: the default stream is always there.
            return unsafe { gpu.on(0) }.download(from, to);
        }
        assert_eq!(from.bytes(), to.len() as u64);
        // SAFETY: spans of these tests are parts of buffers that live.
        unsafe { std::ptr::copy(from.address() as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }
}

/// cuBLAS on the GPU of these tests.
fn blas() -> &'static Blas<'static> {
    static ONE: OnceLock<Blas<'static>> = OnceLock::new();
    let gpu = gpu().expect("a GPU");
    ONE.get_or_init(|| {
        let cublas = Cublas::find().unwrap_or_else(|why| panic!("failed to {why}"));
        gpu.blas(cublas).unwrap_or_else(|why| panic!("failed to {why}"))
    })
}

/// On a GPU cuBLAS; else a stand-in for it that does what BLAS says of sgemm, summed up in f64.
impl Gemm for Emulated {
    fn sgemm(&self, call: &Sgemm) -> Result<(), LaunchError> {
        if let On::Gpu(gpu) = self.on {
            // SAFETY: the default stream is always there.
            unsafe { blas().on(0, Span::NONE) }.sgemm(call)?;
            return finish(gpu, "sgemm");
        }
        let [m, n, k] = [call.m, call.n, call.k].map(|number| number as usize);
        let values = |(span, _): (Span, u32)| {
            let count = span.bytes() as usize / 4;
            // SAFETY: spans of these tests are parts of buffers that live.
            unsafe { std::slice::from_raw_parts(span.address() as *const f32, count) }
        };
        let at = |(of, transposed): ((Span, u32), bool), row: usize, column: usize| {
            let (row, column) = if transposed { (column, row) } else { (row, column) };
            assert!(row < of.1 as usize, "a row beyond the distance between columns");
            f64::from(values(of)[row + column * of.1 as usize])
        };
        let [a, b] = [(call.a, call.transposed[0]), (call.b, call.transposed[1])];
        assert!(m <= call.to.1 as usize);
        for (row, column) in (0..n).flat_map(|column| (0..m).map(move |row| (row, column))) {
            let sum: f64 = (0..k).map(|i| at(a, row, i) * at(b, i, column)).sum();
            let to = (call.to.0.address() as *mut f32).wrapping_add(row + column * call.to.1 as usize);
            assert!(4 * (row + column * call.to.1 as usize) < call.to.0.bytes() as usize);
            // SAFETY: within the span, checked above.
            unsafe { to.write(sum as f32) };
        }
        Ok(())
    }
}

/// Memory of the device between guards that nobody may touch. What it holds at first is garbage.
pub struct Memory {
    words: Vec<u64>,
    /// Where it begins in `words`, in bytes, and how long it is.
    at: usize,
    bytes: usize,
    /// On a GPU: guards and all.
    there: Option<Allocation<'static>>,
}

const GUARD: usize = 64;
const GARBAGE: u64 = 0xa5a5_a5a5_a5a5_a5a5;

impl Memory {
    pub fn new(bytes: u64) -> Self {
        Self::filled(&[], bytes as usize)
    }

    pub fn of<T: Copy>(values: &[T]) -> Self {
        // SAFETY: plain numbers, read as bytes.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        Self::filled(bytes, bytes.len())
    }

    fn filled(content: &[u8], bytes: usize) -> Self {
        // Room to begin at a multiple of 256, as memory of a GPU does.
        let mut words = vec![GARBAGE; bytes.div_ceil(8) + 2 * GUARD + 32];
        let start = words[GUARD..].as_ptr().cast::<u8>();
        let at = 8 * GUARD + if gpu().is_some() { 0 } else { start.align_offset(256) };
        let there = gpu().map(|gpu| gpu.allocate(8 * words.len() as u64).unwrap());
        // SAFETY: there is room behind `at`.
        unsafe {
            let to = words.as_mut_ptr().cast::<u8>().add(at);
            std::ptr::copy_nonoverlapping(content.as_ptr(), to, content.len());
        }
        let memory = Self { words, at, bytes, there };
        if let Some(there) = &memory.there {
            there.write(memory.here()).unwrap();
        }
        memory
    }

    /// All words as bytes.
    fn here(&self) -> &[u8] {
        // SAFETY: all of the vector.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), 8 * self.words.len()) }
    }

    pub fn span(&self) -> Span {
        let base = self.there.as_ref().map_or(self.words.as_ptr() as u64, |there| there.span().address());
        // SAFETY: kernels run while this is borrowed by the test.
        unsafe { Span::new(base + self.at as u64, self.bytes as u64) }
    }

    /// What it holds; checks the guards.
    pub fn bytes(&self) -> Vec<u8> {
        let mut all = self.here().to_vec();
        if let Some(there) = &self.there {
            there.read(&mut all).unwrap();
        }
        let end = self.at + self.bytes;
        assert!(all[..self.at].iter().all(|b| *b == 0xa5), "written in front of the buffer");
        assert!(all[end..].iter().all(|b| *b == 0xa5), "written behind the buffer");
        all[self.at..end].to_vec()
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
    let Some(emulator) = emulator() else { return };
    for kernel in source::MODULES.iter().flat_map(|module| module.kernels) {
        assert_eq!(emulator.run(kernel, (1, 0), &[]).0, 2, "{kernel} is not in emulator/kernels.hpp");
    }
    let mut sizes = [0u64; 5];
    // SAFETY: the signature is that of emulator.cpp.
    unsafe {
        let of = emulator.library.get::<unsafe extern "C" fn(*mut u64)>(b"emulator_sizes").unwrap();
        of(sizes.as_mut_ptr());
    }
    assert_eq!(sizes, flexcomm_gpu_kernels::STRUCTURES);
}
