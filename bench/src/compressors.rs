//! `flexcomm bench compressors`.

use super::data::{DType, Distribution};
use super::fitted;
use super::output::{Output, Skipped};
use super::plot::Plot;
use super::torch;
use super::worker::{Asked, Event, Job, Message, Worker};
use anyhow::{Context, Result, anyhow, bail};
use flexcomm_compression::methods;
use flexcomm_domain::spec::{self, CompressorKind, CompressorSpec};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Arguments of `flexcomm bench compressors`.
#[derive(clap::Args)]
#[command(after_help = "\
Columns:
  GB/s in       bytes of the gradient over the time to compress it
  bytes out     one rank's message, of all exchanges together, in the mean of the steps
  B/kept        bytes out over k, of methods that keep k = a share of the values
  gain          ||C(x)||^2 / ||x||^2: the share of the gradient's energy that is sent; above 1
                for unbiased methods, whose noise is sent too
  to copy       time to compress over the time of a plain copy of the same bytes, by as many
                threads, in this run
  decompress    time to decompress and add up two messages, per message, over the same copy; of
                methods whose messages travel as a sum, time to decompress that sum
  to torch      time to compress over that of torch.topk alone (k = 1 % of n, magnitudes made
                before) on the same data and as many threads; - (null in --json) without torch

A row appears as soon as it is measured. Times are the median of at least 7 repetitions (as
far as --max-time allows) of a copy, compressing and decompressing in turns, each step on other
values. Threads each compress an equal part of the gradient. Parts are matrices, as near to
squares as n allows. What measures is a process of its own: a method that has no row after
--limit is ended, and its row says so; larger sizes of it are not tried. No time is ever
estimated.

Ctrl-C ends the run at once; rows so far, the end of the JSON and the plot are written, and the
status is 130.

--json writes one array, each row on a line of its own as soon as it is measured. All rows have
the same keys. `skipped` says why a row was not measured: it has null in place of numbers. Of
others it is null.

`flexcomm plan --times FILE` and the controller's compressor_times read that JSON; a compressor
at two ratios tells what a kept value costs on top.

torch is looked for in --python, else $FLEXCOMM_PYTHON, else python3 of PATH.

Examples:
  flexcomm bench compressors
      every method at 1e6 and 2.5e7 values
  flexcomm bench compressors --methods topk,onebit --n 1e6
      two of them, quickly
  flexcomm bench compressors --methods 'topk(k=0.001)+ef(vanilla)' --distributions recorded
  flexcomm bench compressors --json --plot compressors.svg
      for scripts and eyes")]
pub struct Args {
    /// Names, or whole strategies with parameters. A name alone, or an alias of it, takes its first example's parameters; threshold,
    /// hardthreshold and variance take one that sends about 1 % of these values (marked *), sketched k = 1 % [default: every one,
    /// and top-k with error feedback].
    #[arg(long, value_name = "A,B", value_parser = split_methods)]
    methods: Option<Methods>,
    /// Values of the gradient, several by commas.
    #[arg(long, value_delimiter = ',', default_value = "1e6,2.5e7", value_parser = read_n)]
    n: Vec<usize>,
    /// Values drawn from these, or recorded from a network's training and repeated up to n.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Distribution::Normal, Distribution::Laplace, Distribution::Recorded])]
    distributions: Vec<Distribution>,
    /// Type of the gradient.
    #[arg(long, value_enum, default_value_t = DType::Fp32)]
    dtype: DType,
    /// Threads, for the copy as well.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Begin no further repetition of one method and size after this long.
    #[arg(long, alias = "patience", default_value = "2s", value_name = "DURATION")]
    max_time: flexcomm_domain::Seconds,
    /// End a method that has no row after this long at a size (spectral methods grow with n^1.5 to n^2).
    #[arg(long, default_value = "60s", value_name = "DURATION")]
    limit: flexcomm_domain::Seconds,
    /// A Python with torch [default: python3 of PATH, if it has torch].
    #[arg(long, value_name = "FILE", env = "FLEXCOMM_PYTHON")]
    python: Option<PathBuf>,
    /// One JSON array of rows instead of the table.
    #[arg(long)]
    json: bool,
    /// Also draw ratios to copy, as SVG.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// What training runs most: selection with error feedback, of which a table of names alone would have no row.
const FED_BACK: &str = "topk(k=0.01)+ef(vanilla)";

/// Strategies' texts.
#[derive(Debug, Clone)]
struct Methods(Vec<String>);

fn split_methods(text: &str) -> Result<Methods, String> {
    let parts: Vec<String> = spec::split_list(text).map(str::to_owned).collect();
    match parts.iter().any(String::is_empty) {
        true => Err("an empty name".into()),
        false => Ok(Methods(parts)),
    }
}

pub(super) fn read_n(text: &str) -> Result<usize, String> {
    let whole = |n: &f64| n.fract() == 0.0 && (1.0..=4e9).contains(n);
    let n = text.trim().parse().ok().filter(whole);
    n.map(|n| n as usize).ok_or_else(|| "allowed is a whole number of values from 1 to 4e9, as 1e6".into())
}

/// A name alone becomes its first example, or waits for the values that its parameters are chosen from.
fn asked(text: &str) -> Result<Asked> {
    // An alias is the name that it stands for.
    let text = text.parse::<CompressorKind>().map_or(text, |kind| kind.name());
    if fitted::is_fitted(text) {
        return Ok(Asked::Fitted(text.to_owned()));
    }
    let entry = methods::all().find(|entry| entry.info.name == text);
    let whole = match entry {
        Some(entry) => format!("{}({})", entry.info.name, fitted::example(entry)),
        None => text.to_owned(),
    };
    let strategy: CompressorSpec = whole.parse().map_err(|e| anyhow!("--methods {text}: failed to {e}"))?;
    Ok(Asked::Strategy(strategy.to_string()))
}

fn all_asked(args: &Args) -> Result<Vec<Asked>> {
    match &args.methods {
        Some(Methods(texts)) => texts.iter().map(|text| asked(text)).collect(),
        None => methods::all().map(|entry| entry.info.name).chain([FED_BACK]).map(asked).collect(),
    }
}

/// Runs `flexcomm bench compressors`.
pub fn run(args: Args) -> Result<()> {
    let methods = all_asked(&args)?;
    if args.limit.get() <= 0.0 {
        bail!("--limit 0s leaves no method any time: allowed is any longer time");
    }
    let plot = args.plot.clone().map(Plot::new).transpose()?;
    let python = torch::find(args.python.as_deref())?;
    if python.is_none() {
        eprintln!("torch: none found (--python FILE names a Python that has it); its column stays empty");
    }
    let all = methods.len() * args.n.len() * args.distributions.len();
    let output = Output::new(args.json, &methods, plot, all)?;
    // What there is is shown after the first Ctrl-C.
    let stop = flexcomm_signals::stop_or_end().context("failed to watch for Ctrl-C")?;
    let mut run = Run { args, methods, python, output, slow: BTreeMap::new(), stop };
    run.cases()?;
    let stopped = run.stop.load(Ordering::Relaxed);
    run.output.finish(stopped)?;
    if stopped {
        std::process::exit(flexcomm_signals::INTERRUPTED);
    }
    Ok(())
}

struct Run {
    args: Args,
    methods: Vec<Asked>,
    python: Option<PathBuf>,
    output: Output,
    /// Methods that had no row in time, and at how many values.
    slow: BTreeMap<Asked, usize>,
    stop: Arc<AtomicBool>,
}

impl Run {
    fn cases(&mut self) -> Result<()> {
        for n in self.args.n.clone() {
            for distribution in self.args.distributions.clone() {
                if self.stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                self.case(n, distribution)?;
            }
        }
        Ok(())
    }

    /// All methods on the same values: one process, and another one after each that had to be ended.
    fn case(&mut self, n: usize, distribution: Distribution) -> Result<()> {
        let mut job = Job {
            methods: self.methods.iter().cloned().collect(),
            n,
            distribution,
            dtype: self.args.dtype,
            threads: self.args.threads.into(),
            max_time_s: self.args.max_time.get(),
            python: self.python.clone(),
            torch_s: None,
        };
        self.leave_out_slow(&mut job)?;
        while !job.methods.is_empty() && !self.stop.load(Ordering::Relaxed) {
            self.drive(&mut job)?;
        }
        Ok(())
    }

    fn leave_out_slow(&mut self, job: &mut Job) -> Result<()> {
        let (n, mut kept) = (job.n, VecDeque::new());
        for method in std::mem::take(&mut job.methods) {
            match self.slow.get(&method) {
                Some(before) if n >= *before => {
                    let reason = format!("no row after {} of n = {before} (--limit)", self.limit());
                    self.output.skip(&skipped(job, &method, reason))?;
                }
                _ => kept.push_back(method),
            }
        }
        job.methods = kept;
        Ok(())
    }

    /// One process, until all methods are measured or it ends; what is done leaves the job.
    fn drive(&mut self, job: &mut Job) -> Result<()> {
        let limit = Duration::from_secs_f64(self.args.limit.get());
        let (mut worker, mut begun) = (Worker::start(job)?, false);
        loop {
            match worker.next(limit, &self.stop) {
                Event::Message(Message::Progress(text)) => self.output.progress(&text),
                Event::Message(Message::Torch(seconds)) => {
                    // Another process need not measure it again.
                    (job.torch_s, job.python) = (seconds, None);
                }
                Event::Message(Message::Begun(method)) => {
                    begun = true;
                    self.output.begin(&format!("{method}, n = {}, {}", job.n, job.distribution.name()));
                }
                Event::Message(Message::Row(row)) => {
                    begun = false;
                    job.methods.pop_front();
                    self.output.row(*row)?;
                }
                Event::Late => return self.give_up_slow(job),
                Event::Message(Message::Failed(reason)) if begun => return self.give_up(job, reason).map(|_| ()),
                Event::Message(Message::Failed(reason)) => return self.give_up_case(job, &reason),
                Event::Stopped => {
                    self.stop.store(true, Ordering::Relaxed);
                    return Ok(());
                }
                Event::Done if job.methods.is_empty() => return Ok(()),
                Event::Done => bail!("the process that measures ended before {}", job.methods[0].label()),
            }
        }
    }

    /// The method that runs has no row.
    fn give_up(&mut self, job: &mut Job, reason: String) -> Result<Asked> {
        let Some(method) = job.methods.pop_front() else { bail!("failed to begin to measure: {reason}") };
        self.output.skip(&skipped(job, &method, reason))?;
        Ok(method)
    }

    /// The method that runs takes too long, and would take longer at larger sizes.
    fn give_up_slow(&mut self, job: &mut Job) -> Result<()> {
        let method = self.give_up(job, format!("no row after {} (--limit)", self.limit()))?;
        self.slow.insert(method, job.n);
        Ok(())
    }

    /// No method runs: none is at fault, and each would fail alike.
    fn give_up_case(&mut self, job: &mut Job, reason: &str) -> Result<()> {
        while !job.methods.is_empty() {
            self.give_up(job, format!("nothing of this size and values was measured: {reason}"))?;
        }
        Ok(())
    }

    fn limit(&self) -> String {
        format!("{} s", self.args.limit.get())
    }
}

fn skipped(job: &Job, method: &Asked, reason: String) -> Skipped {
    Skipped::new((method, job.n), (job.dtype, job.distribution), reason)
}
