//! The processes of the emulated cluster: the same binary that runs in production, one namespace a node.

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};

use crate::plan::{CONTROLLER_PORT, HUB, JOB, LabPlan, node_addr, node_name};

/// How long an orderly end may take before a process is killed.
const TERM_GRACE: Duration = Duration::from_secs(5);

/// Where sockets and databases live inside: a tmpfs.
const RUN: &str = "/run/flexlab";

/// TCP port of the workers' rendezvous.
const WORKER_PORT: u16 = 7080;

/// The emulated cluster's processes by name.
pub(crate) struct Processes {
    exe: PathBuf,
    logs: PathBuf,
    running: Vec<(String, Child)>,
}

impl Processes {
    /// Nothing runs yet; logs go below `out`.
    pub(crate) fn new(out: &Path) -> Result<Self> {
        let logs = out.join("logs");
        std::fs::create_dir_all(&logs).with_context(|| logs.display().to_string())?;
        let exe = std::env::current_exe().context("the path of this program")?;
        Ok(Self { exe, logs, running: Vec::new() })
    }

    /// Starts `flexcomm ARGS`, in a node's namespace when one is named, with its output in a log file.
    fn start(&mut self, name: &str, namespace: Option<&str>, args: &[String]) -> Result<()> {
        let log = self.logs.join(format!("{name}.log"));
        let file = std::fs::File::create(&log).with_context(|| log.display().to_string())?;
        let mut command = match namespace {
            Some(namespace) => {
                // One CPU carries all nodes. On a real node agents find a core free when packets arrive; here
                // they come before the workers, which would otherwise keep them waiting for milliseconds.
                let nice = if name.starts_with("worker") { "10" } else { "-10" };
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, "nice", "-n", nice]).arg(&self.exe);
                command
            }
            None => Command::new(&self.exe),
        };
        command.args(args).env("TMPDIR", "/run/tmp").kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        self.running.push((name.to_owned(), child));
        Ok(())
    }

    /// The controller, in the hub.
    pub(crate) fn start_controller(&mut self, token_file: &Path) -> Result<()> {
        let config = format!("{RUN}/controller.toml");
        std::fs::write(&config, super::config::controller(token_file)).context(config.clone())?;
        self.start("controller", None, &["controller".into(), "--config".into(), config])
    }

    /// Node `i`'s agent.
    pub(crate) fn start_agent(&mut self, i: usize, token_file: &Path) -> Result<()> {
        let name = node_name(i);
        let config = format!("{RUN}/{name}.toml");
        let url = format!("http://{HUB}:{CONTROLLER_PORT}");
        std::fs::write(&config, super::config::agent(i, &url, RUN, token_file)).context(config.clone())?;
        self.start(&format!("agent-{name}"), Some(&name), &["agent".into(), "--config".into(), config])
    }

    /// Node `i`'s training process.
    pub(crate) fn start_worker(&mut self, plan: &LabPlan, i: usize) -> Result<()> {
        let name = node_name(i);
        let peers: Vec<_> = (0..plan.nodes).map(|j| format!("{}:{WORKER_PORT}", node_addr(j))).collect();
        let epochs = plan.schedule.epochs();
        let hidden: Vec<_> = plan.hidden.iter().map(ToString::to_string).collect();
        let mut args: Vec<String> = vec!["lab".into(), "worker".into()];
        let mut option = |key: &str, value: String| args.extend([format!("--{key}"), value]);
        option("job", JOB.into());
        option("rank", i.to_string());
        option("peers", peers.join(","));
        option("socket", format!("{RUN}/{name}/agent.sock"));
        option("epochs", epochs.to_string());
        option("steps-per-epoch", plan.steps_per_epoch.to_string());
        option("batch", plan.batch.to_string());
        option("hidden", hidden.join(","));
        option("lr", plan.lr.to_string());
        option("momentum", plan.momentum.to_string());
        option("least-compute", format!("{}s", plan.least_compute_s));
        option("seed", plan.seed.to_string());
        option("hash-log", self.logs.join(format!("hash-{name}.csv")).display().to_string());
        if let Some(fixed) = &plan.fixed {
            option("strategy", fixed.clone());
        }
        self.start(&format!("worker-{name}"), Some(&name), &args)
    }

    /// An error when a process that should run has ended, with the end of its log.
    pub(crate) fn check(&mut self) -> Result<()> {
        for (name, child) in &mut self.running {
            if let Some(status) = child.try_wait()?
                && !(status.success() && name.starts_with("worker"))
            {
                let log = self.logs.join(format!("{name}.log"));
                bail!("{name} ended with {status}; the end of {}:\n{}", log.display(), tail(&log));
            }
        }
        Ok(())
    }

    /// Whether every worker has ended well.
    pub(crate) fn training_is_over(&mut self) -> Result<bool> {
        let mut over = true;
        for (name, child) in &mut self.running {
            over &= !name.starts_with("worker") || child.try_wait()?.is_some();
        }
        Ok(over)
    }

    /// Seconds of CPU that each process has used, by name.
    pub(crate) fn cpu(&self) -> Vec<(String, f64)> {
        let of = |(name, child): &(String, Child)| Some((name.clone(), cpu_seconds(child.id()?)?));
        self.running.iter().filter_map(of).collect()
    }

    /// Ends all of them, last started first: workers, agents (which restore their links), controller.
    pub(crate) async fn stop(&mut self) {
        for kind in ["worker", "agent", "controller"] {
            let (ending, rest) = self.running.drain(..).partition(|(name, _)| name.starts_with(kind));
            self.running = rest;
            stop_all(ending).await;
        }
    }
}

async fn stop_all(mut ending: Vec<(String, Child)>) {
    for (name, child) in &ending {
        let Some(pid) = child.id() else { continue };
        if let Err(errno) = kill(Pid::from_raw(pid as i32), Signal::SIGTERM) {
            tracing::debug!(name, error = errno.desc(), "has ended");
        }
    }
    for (name, child) in &mut ending {
        if tokio::time::timeout(TERM_GRACE, child.wait()).await.is_err() {
            tracing::warn!(name, "does not end on SIGTERM and is killed");
            if let Err(error) = child.kill().await {
                tracing::warn!(name, %error, "cannot kill");
            }
        }
    }
}

/// User and system time of a process: fields 14 and 15 of its stat line, in ticks.
fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |i: usize| fields.get(i)?.parse::<f64>().ok();
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    Some((ticks(11)? + ticks(12)?) / per_second as f64)
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_else(|error| error.to_string());
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
