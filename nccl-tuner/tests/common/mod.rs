//! The C host program (`tests/host`) as a process of its own that answers commands.
#![allow(dead_code, clippy::print_stderr, clippy::unwrap_used)]

#[path = "../../../tests/skipped.rs"]
mod skipped;
pub use skipped::skipped;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;
use tempfile::NamedTempFile;

/// All versions of the interface.
pub const VERSIONS: [u32; 6] = [2, 3, 4, 5, 6, 7];

pub const TREE: i32 = 0;
pub const RING: i32 = 1;

/// LL, LL128, Simple of tree and ring; the other five algorithms are not allowed. NCCL takes ring with LL128.
pub const COSTS: &str = "90 50 40 80 30 35 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1";

/// A folder with the plugin under its name and the host program: one for each test program, below cargo's own for
/// tests, which the next run takes over.
pub struct Built {
    folder: PathBuf,
}

impl Built {
    /// With the plugin in it.
    fn new() -> Self {
        let built = Self { folder: Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME")) };
        std::fs::create_dir_all(&built.folder).unwrap();
        built.put(&built.plugin(), |path| _ = std::fs::copy(built_plugin(), path).unwrap());
        built
    }

    /// Makes a file elsewhere and moves it into its place: another run may use the one that is there.
    fn put(&self, file: &Path, make: impl FnOnce(&Path)) {
        let new = NamedTempFile::new_in(&self.folder).unwrap().into_temp_path();
        make(&new);
        new.persist(file).unwrap();
    }

    pub fn plugin(&self) -> PathBuf {
        self.folder.join("libnccl-tuner-flexcomm.so")
    }

    fn host(&self) -> PathBuf {
        self.folder.join("host")
    }
}

/// The plugin as cargo builds it beside the test, which depends on the same crate.
fn built_plugin() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().join("libnccl_tuner_flexcomm.so");
    assert!(path.is_file(), "cargo builds {}", path.display());
    path
}

/// Builds the host once for each test program; nothing where there is no C compiler.
pub fn built() -> Option<&'static Built> {
    static BUILT: OnceLock<Option<Built>> = OnceLock::new();
    let built = BUILT.get_or_init(build).as_ref();
    if built.is_none() {
        skipped("there is no C compiler (cc, or what CC names) to build the host program with");
    }
    built
}

/// The plugin under its name, without the host: for tests that use Python and the symbol table of a library.
pub fn built_alone() -> Option<Built> {
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success());
    if !there("python3") || !there("nm") {
        return None;
    }
    Some(Built::new())
}

fn build() -> Option<Built> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    if !Command::new(&compiler).arg("--version").output().is_ok_and(|out| out.status.success()) {
        return None;
    }
    let built = Built::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/host/host.c");
    let flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"];
    built.put(&built.host(), |path| {
        let mut command = Command::new(&compiler);
        let out = command.args(flags).arg(source).arg("-o").arg(path).arg("-ldl").output().unwrap();
        assert!(out.status.success(), "the host program does not compile: {}", String::from_utf8_lossy(&out.stderr));
    });
    Some(built)
}

/// Longest time that a command is waited for.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A process that stands in for one that trains over NCCL.
pub struct Host {
    child: Child,
    to: Option<ChildStdin>,
    from: mpsc::Receiver<String>,
}

impl Host {
    /// With the plugin's folder on the library path and no settings of NCCL but these.
    pub fn start(built: &Built, settings: &[(&str, &str)]) -> Self {
        let mut command = Command::new(built.host());
        command.env_remove("NCCL_ALGO").env_remove("NCCL_PROTO");
        command.env("LD_LIBRARY_PATH", &built.folder).envs(settings.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let to = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (send, from) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
        Self { child, to, from }
    }

    /// One that has opened the plugin by name, uses a version and has a communicator 0 of 4 ranks on 2 nodes.
    pub fn ready(built: &Built, version: u32) -> Self {
        let mut host = Self::start(built, &[]);
        host.ask("open flexcomm");
        host.ask(&format!("use {version}"));
        assert_eq!(host.ask("init 4 2"), "0");
        host
    }

    /// The answer after "ok", whatever it is.
    pub fn try_ask(&mut self, command: &str) -> Result<String, String> {
        writeln!(self.to.as_mut().unwrap(), "{command}").unwrap();
        let line = match self.from.recv_timeout(TIMEOUT) {
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{command:?} has no answer after {TIMEOUT:?}"),
            line => line.unwrap_or_default(),
        };
        let line = line.trim_end();
        match line.split_once(' ').unwrap_or((line, "")) {
            ("ok", answer) => Ok(answer.to_owned()),
            ("err", why) => Err(why.to_owned()),
            _ => panic!("{command:?} ended the process: {:?}, {line:?}", self.child.wait()),
        }
    }

    /// The answer after "ok"; anything else fails the test.
    pub fn ask(&mut self, command: &str) -> String {
        self.try_ask(command).unwrap_or_else(|why| panic!("{command:?}: {why}"))
    }

    /// The algorithm that both generations of NCCL take for an allreduce of communicator 0 with these costs, and how
    /// many entries the plugin changed.
    pub fn allreduce(&mut self, costs: &str) -> (i32, usize) {
        let answer = self.ask(&format!("coll 0 4 1048576 7 3 {costs}"));
        picked(&answer)
    }

    pub fn prefer(&mut self, scope: i32, algorithm: i32, step: u64) {
        assert_eq!(self.ask(&format!("prefer {scope} {algorithm} {step}")), "0");
    }

    /// A number of the state by its name.
    pub fn state(&mut self, name: &str) -> i64 {
        let state = self.ask("state");
        let mut words = state.split(' ').skip_while(|word| *word != name);
        words.nth(1).unwrap_or_else(|| panic!("{name} in {state}")).parse().unwrap()
    }

    /// What was said to NCCL's logger since the last look.
    pub fn logs(&mut self) -> Vec<String> {
        self.ask("logs").split("| ").map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// Ends it in order.
    pub fn end(mut self) {
        drop(self.to.take());
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the host ends with {status}");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `old A/P new A/P changed N`: the algorithm, the same for both generations of NCCL, and the entries changed.
pub fn picked(answer: &str) -> (i32, usize) {
    let words: Vec<&str> = answer.split(' ').collect();
    let ["old", old, "new", new, "changed", changed] = words[..] else { panic!("{answer}") };
    assert_eq!(old, new, "two generations of NCCL differ");
    let (algorithm, _) = old.split_once('/').unwrap();
    (algorithm.parse().unwrap(), changed.parse().unwrap())
}
