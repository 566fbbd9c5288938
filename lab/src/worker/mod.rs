//! A real training job to steer: data-parallel SGD on real images, one process per rank, gradients over TCP.
//!
//! Every rank holds the same parameters at every step; a hash of them can be logged and compared. What is
//! sent, and how, follows the decision in force, which all ranks change at the same step.

mod data;
mod exchange;
mod hashes;
mod job;
mod mesh;
mod model;
mod report;
mod state;
mod sync;

pub use data::{DEFAULT_FOLDER, Images, Order};
pub use job::Ended;
pub use mesh::{FRAME_HEAD, MAX_WORLD, MeshError};
pub use model::{cross_entropy, recognised};
pub use report::{BACKEND, hello};
pub use state::sgd_update;

use anyhow::{Context, Result, bail, ensure};
use exchange::Exchanger;
use flexcomm_domain::{Digest, JobId, Rank, Seconds, Strategy};
use flexcomm_exchange::{LeaderShadows, Shadows};
use flexcomm_trainer::{Agreement, Client, Control, Reporter};
use job::{Job, Length};
use mesh::{Mesh, MeshConfig};
use model::{MAX_PARAMETERS, Shape};
use state::{Inputs, Sgd, Training};
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use sync::Synchronizer;

/// Largest batch: bounds the buffers to 50 MB of pixels.
const MAX_BATCH: usize = 16_384;

/// Longest job.
const MAX_STEPS: u64 = 1 << 40;

/// Epochs without `--epochs` and `--steps`.
const DEFAULT_EPOCHS: u64 = 10;

/// One rank of a data-parallel training job.
///
/// Start one process per rank with the same `--peers` (and the same other options); they find each other,
/// train a small network on Fashion-MNIST and exchange gradients over TCP. With `--socket` rank 0 follows the
/// decisions that the agent publishes, and takes all ranks with it at the same step; without an agent, or when
/// it goes away, training goes on with the strategy in force. Ctrl-C on any rank ends the job in an orderly way
/// on all of them.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// This process's rank, from 0; rank 0 listens to the agent's decisions, holds the test images and
    /// prints progress.
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    /// IP:PORT of every rank in order, this one's included; ranks listen on their own.
    #[arg(long, value_delimiter = ',', default_value = "127.0.0.1:7080", value_name = "IP:PORT,...", value_parser = peer)]
    pub peers: Vec<SocketAddr>,
    /// The job's name.
    #[arg(long, default_value = "lab")]
    pub job: JobId,
    /// The agent's Unix socket; without it decisions are neither received nor reported on.
    #[arg(long, env = "FLEXCOMM_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Hold this strategy (written as for --initial) for the whole run instead of following decisions;
    /// trials still run.
    #[arg(long, value_name = "STRATEGY", conflicts_with = "initial")]
    pub strategy: Option<Strategy>,
    /// What runs before the first decision: COMPRESSOR/COLLECTIVE[:SELECTION] of any compressor, for example
    /// "topk(k=0.01)+ef(vanilla)/art-ring:star", or in short topk@0.01/art-ring:star.
    #[arg(long, value_name = "STRATEGY", default_value = "none/dense-ring")]
    pub initial: Strategy,
    /// Passes over --steps-per-epoch steps each [default: 10].
    #[arg(long)]
    pub epochs: Option<u64>,
    /// Steps in an epoch, after each of which accuracy is measured [default: one pass over the images].
    #[arg(long)]
    pub steps_per_epoch: Option<u64>,
    /// Steps of the whole run, instead of --epochs.
    #[arg(long, conflicts_with = "epochs")]
    pub steps: Option<u64>,
    /// Samples per rank and step.
    #[arg(long, default_value_t = 16)]
    pub batch: usize,
    /// Learning rate.
    #[arg(long, default_value_t = 0.05, allow_negative_numbers = true)]
    pub lr: f32,
    /// Share of the last update that is kept, from 0 to below 1.
    #[arg(long, default_value_t = 0.9, allow_negative_numbers = true)]
    pub momentum: f32,
    /// Forward and backward take at least this long (25ms): a small network stands in for one whose gradient takes
    /// longer to compute, and what is left of the time is slept.
    #[arg(long, default_value = "0s", value_name = "DURATION")]
    pub least_compute: Seconds,
    /// Hidden layers between 784 pixels and 10 classes; 256,128 has 235,146 parameters.
    #[arg(long, value_delimiter = ',', default_value = "256,128")]
    pub hidden: Vec<usize>,
    /// Seed of initial parameters, data order and what compressors draw.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Folder with Fashion-MNIST's four idx.gz files.
    #[arg(long, default_value = DEFAULT_FOLDER)]
    pub data: PathBuf,
    /// Held-out images on which rank 0 measures accuracy, at most 10000.
    #[arg(long, default_value_t = 1000)]
    pub eval_samples: usize,
    /// Write step, version and a hash of all parameters to this file after every step.
    #[arg(long, value_name = "FILE")]
    pub hash_log: Option<PathBuf>,
    /// How long to wait for the other ranks at the start, and for silent ones later (for example 30s, 2m).
    #[arg(long, default_value = "60s")]
    pub timeout: Seconds,
}

fn peer(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected IP:PORT of each rank, for example 10.0.0.1:7080,10.0.0.2:7080".to_owned())
}

/// Images instead of the files, for tests: the training shard of this rank, and the held-out ones.
#[derive(Debug, Clone)]
pub struct Data {
    /// This rank's part.
    pub shard: Images,
    /// Images of all ranks' parts together.
    pub total: usize,
    /// For accuracy; rank 0 only.
    pub held_out: Images,
}

/// Where a rank runs: what [`run`] takes from the process and tests provide.
pub struct Surroundings {
    /// Open on this rank's address.
    pub listener: TcpListener,
    /// What to train on.
    pub data: Data,
    /// Set it to end the job.
    pub stop: Arc<AtomicBool>,
    /// Where rank 0 writes a line an epoch.
    pub progress: Box<dyn Write + Send>,
    /// Changes this rank's gradient before it is exchanged, as failing hardware would. No codec takes one of another length.
    pub spoil: Spoil,
}

/// See [`Surroundings::spoil`].
pub type Spoil = Box<dyn FnMut(&mut Vec<f32>) + Send>;

/// Runs a rank until its job is done, its peers fail or it is told to stop.
pub fn run(args: Args) -> Result<()> {
    let stop = flexcomm_signals::stop_or_end().context("watch for Ctrl-C")?;
    let config = args.checked()?;
    // Before the data is read: peers that start sooner find an open port.
    let listener = Mesh::listen(&config)?;
    let world = args.peers.len();
    let (shard, total) = Images::training_shard(&args.data, args.rank as usize, world)?;
    let held_out = if args.rank == 0 { Images::held_out(&args.data, args.eval_samples)? } else { Images::default() };
    let data = Data { shard, total, held_out };
    let progress = Box::new(std::io::stdout());
    let spoil = Box::new(|_: &mut Vec<f32>| {});
    let ended = train(args, Surroundings { listener, data, stop, progress, spoil })?;
    tracing::info!(steps = ended.steps, stopped = ended.stopped, "the job has ended");
    Ok(())
}

/// As [`run`], in given surroundings.
pub fn train(args: Args, surroundings: Surroundings) -> Result<Ended> {
    let config = args.checked()?;
    let Surroundings { listener, data, stop, progress, spoil } = surroundings;
    ensure!(!data.shard.is_empty(), "there are fewer images than ranks");
    let shape = args.training().shape()?;
    let (rank, world) = (Rank(args.rank), args.peers.len());
    let layers = flexcomm_exchange::layers(&shape.params())?;
    let hashes = hashes::HashLog::new(args.hash_log.as_deref())?;
    let length = args.length(data.total);
    let mesh = Mesh::connect(listener, &config, stop).context("bring the job's ranks together")?;
    let hello = flexcomm_wire::Hello {
        run: Some(mesh.run()),
        momentum: Some(args.momentum.into()),
        ..report::hello(&args.job, rank, world, &layers)
    };
    let mut reporter = Reporter::new(args.job.clone(), rank);
    if let Some(socket) = &args.socket {
        reporter.connect(Client::start(socket, hello).context("start the agent's client")?);
    }
    let sync = Synchronizer::new(Exchanger::new(mesh), shape.params(), args.seed, f64::from(args.lr))?;
    let least_compute = Duration::from_secs_f64(args.least_compute.get());
    let sgd = Sgd { batch: args.batch, lr: args.lr, momentum: args.momentum, least_compute };
    // Data order must differ between ranks, everything else must not.
    let own_seed = args.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(args.rank) + 1);
    let inputs = Inputs { images: data.shard, order_seed: own_seed, parameters_seed: args.seed, spoil };
    let training = Training::new(&shape, sgd, inputs, sync);
    let mut control = Control::new(Agreement::new(rank, args.strategy.unwrap_or(args.initial), 0), rank);
    control.steer(true);
    let job = Job {
        name: args.job.clone(),
        rank,
        length,
        follow: args.strategy.is_none(),
        control,
        training,
        held_out: data.held_out,
        reporter,
        shadows: Shadows::new(Shadows::SHARE, args.seed),
        leader_shadows: LeaderShadows::new(&shape.params()),
        sample: Vec::new(),
        hashes,
        world: world as u32,
        message: Vec::new(),
        progress,
    };
    job.run()
}

/// What worker and lab are told about the training alike.
#[derive(Debug, Clone, Copy)]
pub struct TrainingSettings<'a> {
    /// Samples per rank and step.
    pub batch: usize,
    /// Learning rate.
    pub lr: f64,
    /// Share of the last update that is kept.
    pub momentum: f64,
    /// Absent: one pass over the images.
    pub steps_per_epoch: Option<u64>,
    /// Forward and backward take at least this long.
    pub least_compute: Seconds,
    /// Hidden layers.
    pub hidden: &'a [usize],
}

impl TrainingSettings<'_> {
    /// Names the first option that cannot be used, with what is allowed.
    pub fn check(&self) -> Result<()> {
        ensure!((1..=MAX_BATCH).contains(&self.batch), "--batch {}: allowed are 1 to {MAX_BATCH}", self.batch);
        let lr = self.lr > 0.0 && self.lr <= f64::from(f32::MAX);
        ensure!(lr, "--lr {:e}: allowed is above 0, at most {:.1e}", self.lr, f32::MAX);
        ensure!((0.0..1.0).contains(&self.momentum), "--momentum {}: allowed is 0 to below 1", self.momentum);
        ensure!(self.steps_per_epoch != Some(0), "--steps-per-epoch 0: an epoch has at least one step");
        ensure!(self.least_compute.get() <= 60.0, "--least-compute {}: it must be 60s or less", self.least_compute);
        self.shape().map(|_| ())
    }

    fn shape(&self) -> Result<Shape> {
        let help = || format!("--hidden {:?}: layers must not be empty, at most {MAX_PARAMETERS} values", self.hidden);
        Shape::new(self.hidden).with_context(help)
    }
}

impl Args {
    fn training(&self) -> TrainingSettings<'_> {
        TrainingSettings {
            batch: self.batch,
            lr: f64::from(self.lr),
            momentum: f64::from(self.momentum),
            steps_per_epoch: self.steps_per_epoch,
            least_compute: self.least_compute,
            hidden: &self.hidden,
        }
    }

    /// The same on every rank, although shards may differ by an image.
    fn length(&self, images: usize) -> Length {
        let pass = images / (self.batch * self.peers.len());
        let steps_per_epoch = self.steps_per_epoch.unwrap_or(pass as u64).max(1);
        let epochs = self.epochs.unwrap_or(DEFAULT_EPOCHS);
        let steps = self.steps.unwrap_or_else(|| epochs.saturating_mul(steps_per_epoch)).min(MAX_STEPS);
        Length { steps, steps_per_epoch }
    }

    /// Checks what clap cannot.
    fn checked(&self) -> Result<MeshConfig> {
        let world = self.peers.len();
        ensure!((1..=MAX_WORLD).contains(&world), "--peers names {world} ranks, allowed are 1 to {MAX_WORLD}");
        ensure!((self.rank as usize) < world, "--rank {} is none of the {world} ranks of --peers", self.rank);
        for (i, addr) in self.peers.iter().enumerate() {
            ensure!(addr.port() != 0, "--peers: rank {i} has port 0, which nobody could call");
            if let Some(j) = self.peers[..i].iter().position(|other| other == addr) {
                bail!("--peers: ranks {j} and {i} have the same address {addr}");
            }
        }
        let steps = self.steps.unwrap_or(1);
        ensure!((1..=MAX_STEPS).contains(&steps), "--steps {steps}: allowed are 1 to {MAX_STEPS}");
        ensure!(self.epochs != Some(0), "--epochs 0: allowed are 1 or more");
        ensure!(self.timeout.get() >= 0.001, "--timeout {}: it must be 1ms or more", self.timeout);
        self.training().check()?;
        for (option, strategy) in [("--strategy", self.strategy), ("--initial", Some(self.initial))] {
            let refused = strategy.and_then(|strategy| strategy.spec().trainable().err());
            refused.map_or(Ok(()), Err).context(option)?;
        }
        Ok(MeshConfig {
            rank: Rank(self.rank),
            peers: self.peers.clone(),
            settings: self.settings(),
            timeout: Duration::from_secs_f64(self.timeout.get()),
        })
    }

    /// Digest of everything that must be alike on all ranks, or they would run apart.
    fn settings(&self) -> u64 {
        let strategy = self.strategy.unwrap_or(self.initial);
        let length = (self.steps, self.epochs, self.steps_per_epoch);
        let network = (&self.hidden, self.batch, self.lr, self.momentum, self.seed);
        let text = format!("{} {strategy} {} {length:?} {network:?}", self.job, self.strategy.is_some());
        Digest::of(&text).0
    }
}
