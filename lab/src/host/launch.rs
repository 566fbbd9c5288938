//! Starts the inside, relays its lines, ends it.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{forward, net};
use crate::plan::{CONTROLLER_PORT, LINE, LabPlan, UML_ADDR};

/// Of a channel whose other end is gone.
const THREAD_ENDED: &str = "the lab's inside failed: its thread ended";

/// How long the inside may take to end by itself once told to stop, before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(25);

/// Lines of kernel output kept to explain an inside that never came up.
const KEPT_LINES: usize = 40;

/// What the inside runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    /// netns where the kernel has netem, else uml.
    Auto,
    /// Network namespaces of this kernel (needs netem).
    Netns,
    /// User-mode Linux: a kernel with netem in a process.
    Uml,
}

/// The host's options.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Which kernel.
    pub backend: Backend,
    /// Where REST and page are reachable; loopback only.
    pub listen: SocketAddr,
}

enum Event {
    Line(String),
    Closed,
}

/// A lab that nothing stands against any more, before it has made anything that lasts. Dropping it leaves nothing.
pub struct Ready {
    /// Where page and REST will be.
    pub listen: SocketAddr,
    plans: mpsc::Sender<LabPlan>,
    started: mpsc::Receiver<Result<Child>>,
}

/// Checks all that can refuse a lab: root, the page's address, a kernel that can carry the network.
pub fn prepare(options: HostOptions) -> Result<Ready> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the lab makes network namespaces and tap devices: run it as root (sudo)");
    }
    let listener = forward::bind(options.listen)?;
    let listen = listener.local_addr().unwrap_or(options.listen);
    let (plans, planned) = mpsc::channel();
    let (send, started) = mpsc::channel();
    let (checked, network) = mpsc::channel();
    // The inside's parent-death signal is tied to the thread that starts it, so this thread stays: it
    // carries the page's connections until the process ends.
    std::thread::spawn(move || {
        let uml = match carrier(options.backend) {
            Ok(uml) => checked.send(Ok(())).map(|()| uml),
            Err(error) => return drop(checked.send(Err(error))),
        };
        let (Ok(uml), Ok(plan)) = (uml, planned.recv()) else { return };
        let plan = LabPlan { uml, ..plan };
        let ready = start(&plan);
        let ok = ready.is_ok();
        if send.send(ready).is_ok() && ok {
            serve(listener, plan_target(&plan));
        }
    });
    network.recv().ok().context(THREAD_ENDED)??;
    Ok(Ready { listen, plans, started })
}

impl Ready {
    /// Runs a lab to its end, passing each of its lines to `print`. `stop` is asked a few times a second.
    pub fn run(self, plan: LabPlan, stop: impl Fn() -> bool, mut print: impl FnMut(&str)) -> Result<()> {
        let uml = uml_folder(&plan);
        self.plans.send(plan).ok().context(THREAD_ENDED)?;
        let mut child = self.started.recv().ok().context(THREAD_ENDED)??;
        let outcome = relay(&mut child, &stop, &mut print);
        // Not there without user-mode Linux.
        let _ = std::fs::remove_dir_all(uml);
        outcome
    }
}

/// Where user-mode Linux keeps its console's socket; by default it leaves one in the home folder at every start.
fn uml_folder(plan: &LabPlan) -> PathBuf {
    plan.out.join("uml")
}

fn plan_target(plan: &LabPlan) -> SocketAddr {
    let ip = if plan.uml { UML_ADDR } else { Ipv4Addr::LOCALHOST };
    SocketAddr::new(IpAddr::V4(ip), CONTROLLER_PORT)
}

fn serve(listener: std::net::TcpListener, target: SocketAddr) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    let local = tokio::task::LocalSet::new();
    if let Err(error) = local.block_on(&runtime, forward::carry(listener, target)) {
        tracing::warn!(%error, "the page's forwarder ended");
    }
}

/// Enters a new network namespace with the calling thread; true when user-mode Linux must carry the network.
fn carrier(backend: Backend) -> Result<bool> {
    net::enter_new_namespace()?;
    let netem = net::kernel_has_netem();
    let uml = match backend {
        Backend::Auto => !netem,
        Backend::Netns if netem => false,
        Backend::Netns => {
            bail!("--backend netns: this kernel has no netem; remedy: modprobe sch_netem, or --backend uml")
        }
        Backend::Uml => true,
    };
    if uml {
        if !Path::new("/usr/bin/linux.uml").exists() {
            bail!(
                "this kernel has no netem and user-mode Linux is not installed; \
                 remedy: apt-get install user-mode-linux (or a kernel with CONFIG_NET_SCH_NETEM)"
            );
        }
        net::add_tap()?;
    }
    Ok(uml)
}

/// Starts the inside from the thread that entered its namespace.
fn start(plan: &LabPlan) -> Result<Child> {
    let path = plan.out.join("plan.json");
    let shown = || path.display().to_string();
    let text = serde_json::to_string_pretty(plan).with_context(shown)?;
    std::fs::write(&path, text).with_context(shown)?;
    let exe = std::env::current_exe().with_context(shown)?;
    let mut command = if plan.uml { uml_command(&exe, &path, &uml_folder(plan))? } else { netns_command(&exe, &path) };
    // A group of its own: Ctrl-C at the terminal is for this process, which then ends the inside in order.
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let shown = format!("{command:?}");
    command.spawn().with_context(|| format!("`{shown}` failed"))
}

/// `setpriv` kills the tree when this process dies, `unshare` puts it into a PID namespace so that nothing
/// in it can outlive it.
fn jailed() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child=KILL"]);
    command
}

fn netns_command(exe: &Path, plan: &Path) -> Command {
    let mut command = jailed();
    command.args(["--mount", "--mount-proc"]).arg(exe).args(["lab", "inside"]).arg(plan);
    command
}

/// A library for user-mode Linux; `uml/preload.c` says what for.
static PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

fn uml_command(exe: &Path, plan: &Path, folder: &Path) -> Result<Command> {
    let preload = folder.join("preload.so");
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&preload, PRELOAD));
    written.with_context(|| preload.display().to_string())?;
    let mut command = jailed();
    if !PRELOAD.is_empty() {
        command.env("LD_PRELOAD", &preload);
    }
    command.args(["linux.uml", "mem=1536M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw"]);
    command.arg(format!("init={}", exe.display())).arg(format!("uml_dir={}/", folder.display()));
    command.args(["vec0:transport=tap,ifname=tap0,depth=128", "con=null", "con0=fd:0,fd:1", "quiet"]);
    command.args(["--", "lab", "inside"]).arg(plan);
    // Its memory is a file in TMPDIR: a tmpfs makes it memory indeed.
    if Path::new("/dev/shm").is_dir() {
        command.env("TMPDIR", "/dev/shm");
    }
    Ok(command)
}

fn relay(child: &mut Child, stop: &impl Fn() -> bool, print: &mut impl FnMut(&str)) -> Result<()> {
    let stdin = child.stdin.take();
    let stdout = child.stdout.take().context("the lab's inside failed: no output pipe")?;
    let (send, events) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            if send.send(Event::Line(text)).is_err() {
                return;
            }
        }
        // The receiver may be gone already when the run was stopped.
        let _ = send.send(Event::Closed);
    });
    let outcome = follow(&events, stdin, stop, print);
    end(child);
    outcome
}

/// Passes lines on until the output closes; tells the inside to stop when asked to.
fn follow(
    events: &mpsc::Receiver<Event>,
    stdin: Option<ChildStdin>,
    stop: &impl Fn() -> bool,
    print: &mut impl FnMut(&str),
) -> Result<()> {
    let mut stdin = stdin;
    let mut stopping: Option<Instant> = None;
    let (mut kept, mut spoke, mut failure) = (Vec::<String>::new(), false, None);
    loop {
        match events.recv_timeout(Duration::from_millis(100)) {
            Ok(Event::Line(line)) => match line.strip_prefix(LINE) {
                Some(own) => {
                    spoke = true;
                    match own.strip_prefix("error: ") {
                        Some(error) => failure = Some(error.replace(" | ", "\n")),
                        None => print(own),
                    }
                }
                None => {
                    kept.push(line);
                    let surplus = kept.len().saturating_sub(KEPT_LINES);
                    kept.drain(..surplus);
                }
            },
            Ok(Event::Closed) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if stopping.is_none() && stop() {
            stopping = Some(Instant::now());
            if let Some(pipe) = stdin.as_mut() {
                // A closed pipe means that it is ending already.
                let _ = pipe.write_all(b"stop\n").and_then(|()| pipe.flush());
            }
        }
        if stopping.is_some_and(|since| since.elapsed() > STOP_GRACE) {
            print("the inside did not end in time and is killed");
            break;
        }
    }
    drop(stdin.take());
    match failure {
        Some(error) => bail!("the lab's inside failed: {error}"),
        None if !spoke => {
            bail!("the lab's inside ended without a word of its own; its last lines were:\n{}", kept.join("\n"))
        }
        None => Ok(()),
    }
}

fn end(child: &mut Child) {
    // Killing `unshare` kills the PID namespace with all that is in it.
    if let Err(error) = child.kill() {
        tracing::debug!(%error, "the inside had ended");
    }
    if let Err(error) = child.wait() {
        tracing::warn!(%error, "cannot wait for the inside");
    }
}
