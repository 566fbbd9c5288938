//! `flexcomm lab`: an emulated cluster on this machine.

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use flexcomm_lab::host::{Backend, HostOptions};
use flexcomm_lab::plan::{LabPlan, MAX_NODES, TOKEN_FILE};
use flexcomm_lab::worker::TrainingSettings;
use flexcomm_sim::schedule::{self, Schedule};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

/// Arguments of `flexcomm lab`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Lab,
}

#[derive(Subcommand)]
enum Lab {
    /// Build the cluster, train on it, replay the network trace, show what flexcomm decides.
    ///
    /// Needs root. On a kernel without netem it runs inside user-mode Linux by itself. Everything it makes
    /// (namespaces, devices, processes) is gone when it ends, whichever way it ends.
    ///
    /// Links are measured more often than by default, and probes may take 20 % of a link, not 1 %: links are scaled down,
    /// tests are not, and a phase lasts a minute.
    Up(Box<Up>),
    /// One training process (rank) of a data-parallel job, as the lab runs on each of its nodes.
    Worker(Box<flexcomm_lab::worker::Args>),
    /// The inside of a lab; started by `up`.
    #[command(hide = true)]
    Inside {
        plan: PathBuf,
        /// User-mode Linux appends words of its own.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        kernel: Vec<String>,
    },
}

#[derive(clap::Args)]
struct Up {
    /// Nodes; each has an agent and a worker.
    #[arg(long, default_value_t = 4)]
    nodes: usize,
    /// The network trace: c1 or c2 (the paper's schedules), or a TOML file with phases of your own.
    #[arg(long, default_value = "c1")]
    scenario: String,
    /// Divide the paper's bandwidths by this: 1/250 of the rate with 1/250 of the bytes keeps every time.
    #[arg(long, default_value_t = 250.0)]
    rate_divisor: f64,
    /// Epochs of the whole schedule (the paper: 50); phases are stretched or shrunk with it.
    #[arg(long)]
    epochs: Option<u32>,
    /// Training steps in an epoch.
    #[arg(long, default_value_t = 50)]
    steps_per_epoch: u64,
    /// Samples per worker and step.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Hidden layers of the network (784 inputs, 10 classes): 128 has 101,770 parameters, 1/250 of ResNet50.
    #[arg(long, value_delimiter = ',', default_value = "128")]
    hidden: Vec<usize>,
    /// Learning rate.
    #[arg(long, default_value_t = 0.1)]
    lr: f64,
    /// Share of the last update that is kept, 0 to below 1; the paper's runs of ResNets have 0.1 too.
    #[arg(long, default_value_t = 0.1)]
    momentum: f64,
    /// Forward and backward take at least this long. The network of the lab is 1/250 of the one it stands for, and its
    /// computation must not be: without it a whole phase passes within seconds.
    #[arg(long, default_value = "25ms", value_name = "DURATION")]
    least_compute: flexcomm_domain::Seconds,
    /// Seed of data order, initial parameters and planner.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Hold one strategy instead of following decisions, for comparisons (for example topk@0.01/allgather).
    #[arg(long)]
    strategy: Option<String>,
    /// End after this long (30s, 3m, 1h), wherever the training is.
    #[arg(long = "for", value_name = "DURATION")]
    for_: Option<flexcomm_domain::Seconds>,
    /// End when the training is over, instead of staying up with page and REST until Ctrl-C.
    #[arg(long)]
    exit_when_done: bool,
    /// Where page and REST are reachable on this machine (loopback only).
    #[arg(long, default_value = "127.0.0.1:7070", value_name = "IP:PORT", value_parser = crate::address)]
    listen: SocketAddr,
    /// Which kernel carries the network.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,
    /// Where logs, history and summary go [default: a new folder below the system's temporary folder].
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Runs `flexcomm lab`.
pub fn run(args: Args) -> Result<()> {
    match args.command {
        Lab::Up(up) => run_up(*up),
        Lab::Worker(args) => flexcomm_lab::worker::run(*args),
        Lab::Inside { plan, kernel: _ } => flexcomm_lab::inside::run(&plan),
    }
}

fn load_schedule(up: &Up) -> Result<Schedule> {
    let schedule = match up.scenario.as_str() {
        "c1" => schedule::c1().scaled(up.rate_divisor).context("failed to read --rate-divisor")?,
        "c2" => schedule::c2().scaled(up.rate_divisor).context("failed to read --rate-divisor")?,
        file => {
            let text = std::fs::read_to_string(file).with_context(|| {
                format!("failed to read --scenario {file}: neither c1 nor c2 nor a file that can be read")
            })?;
            Schedule::from_toml(&text).with_context(|| format!("failed to read --scenario {file}"))?
        }
    };
    match up.epochs {
        Some(epochs) => schedule.stretched(epochs).context("failed to read --epochs"),
        None => Ok(schedule),
    }
}

fn plan(up: &Up) -> Result<LabPlan> {
    if !(2..=MAX_NODES).contains(&up.nodes) {
        bail!("--nodes {}: allowed is 2 to {MAX_NODES}", up.nodes);
    }
    let training = TrainingSettings {
        batch: up.batch,
        lr: up.lr,
        momentum: up.momentum,
        steps_per_epoch: Some(up.steps_per_epoch),
        least_compute: up.least_compute,
        hidden: &up.hidden,
    };
    training.check()?;
    if let Some(strategy) = &up.strategy {
        strategy.parse::<flexcomm_domain::Strategy>().context("failed to read --strategy")?;
    }
    Ok(LabPlan {
        nodes: up.nodes,
        schedule: load_schedule(up)?,
        steps_per_epoch: up.steps_per_epoch,
        seed: up.seed,
        batch: up.batch,
        hidden: up.hidden.clone(),
        lr: up.lr,
        momentum: up.momentum,
        least_compute_s: up.least_compute.get(),
        fixed: up.strategy.clone(),
        for_s: up.for_.map(|t| t.get()),
        stay: !up.exit_when_done,
        out: up.out.clone().unwrap_or_default(),
        uml: false,
    })
}

/// A new folder below the system's temporary folder; one that stands there already may be anybody's.
fn new_folder() -> Result<PathBuf> {
    let base = std::env::temp_dir().join(format!("flexcomm-lab-{}", std::process::id()));
    for i in 1.. {
        let path = if i == 1 { base.clone() } else { base.with_extension(i.to_string()) };
        match std::fs::create_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            outcome => {
                return outcome.map(|()| path.clone()).with_context(|| format!("failed to create {}", path.display()));
            }
        }
    }
    bail!("no free name for a folder beside {}", base.display())
}

/// Checks everything, then makes the folder, then tells where things are: what is refused leaves nothing behind.
fn run_up(up: Up) -> Result<()> {
    let mut plan = plan(&up).map_err(|why| crate::BadArgument(format!("{why:#}")))?;
    // So that the cluster is taken down in order.
    let stop = flexcomm_signals::stop().context("failed to watch for Ctrl-C")?;
    let lab = flexcomm_lab::host::prepare(HostOptions { backend: up.backend, listen: up.listen })?;
    let out = match up.out {
        None => new_folder()?,
        Some(out) => std::fs::create_dir_all(&out)
            .map(|()| out.clone())
            .with_context(|| format!("failed to create --out {}", out.display()))?,
    };
    plan.out = out.canonicalize().with_context(|| format!("failed to find --out {}", out.display()))?;
    // For as long as this process lives: two labs would write into each other's logs.
    let held = std::fs::File::open(&plan.out).with_context(|| format!("failed to open --out {}", out.display()))?;
    if let Err(std::fs::TryLockError::WouldBlock) = held.try_lock() {
        bad_argument!("--out {}: a lab that is running writes there, choose another", out.display());
    }
    println!("flexcomm lab: logs and results in {}", plan.out.display());
    println!("{}", flexcomm_lab::inside::LAB_SETTINGS);
    println!("page: http://{}/   REST: http://{}/api/v1/jobs/lab/decision   (Ctrl-C ends)", lab.listen, lab.listen);
    println!("token, which REST asks for where something is set: {}", plan.out.join(TOKEN_FILE).display());
    lab.run(plan, || stop.load(Ordering::Relaxed), |line| println!("{line}"))?;
    Ok(())
}
