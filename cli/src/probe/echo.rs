//! `flexcomm probe echo`.

use super::{Common, TokenArgs, describe, ms, percent, print_json};
use anyhow::{Context, bail};
use flexcomm_domain::Seconds;
use flexcomm_probes::ECHO_PORT;
use flexcomm_probes::echo::{EchoSummary, ProberLimits};
use flexcomm_probes::edge::{EchoProber, EchoSettings};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often events are looked for.
const LOOK: Duration = Duration::from_millis(5);

#[derive(clap::Args)]
pub(super) struct Args {
    /// Name or address of the host to measure.
    host: String,
    /// UDP port of the echo responder there.
    #[arg(long, default_value_t = ECHO_PORT)]
    port: u16,
    /// Echoes to send; Ctrl-C ends earlier and prints what was found so far.
    #[arg(short, long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    count: u64,
    /// Time between two echoes, with a unit (at least 1ms).
    #[arg(short, long, default_value = "100ms")]
    interval: Seconds,
    /// An echo without an answer after this is lost.
    #[arg(long, default_value = "2s")]
    timeout: Seconds,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    token: TokenArgs,
}

#[derive(serde::Serialize)]
struct Report {
    target: SocketAddr,
    #[serde(flatten)]
    summary: EchoSummary,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let token = args.token.read()?;
    let target = SocketAddr::new(args.common.resolve(&args.host)?, args.port);
    let stop = flexcomm_signals::stop_or_end().context("failed to watch for Ctrl-C")?;
    let (interval_s, timeout_s) = (args.interval.get(), args.timeout.get());
    if interval_s < 0.001 {
        bad_argument!("--interval is {interval_s} s, allowed is 1ms or more");
    }
    if timeout_s < 0.001 {
        bad_argument!("--timeout is {timeout_s} s, allowed is 1ms or more");
    }
    // The window holds the whole run (its newest 4096 echoes).
    let window_s = args.count as f64 * interval_s + 10.0 * timeout_s;
    let settings = EchoSettings { interval_s, limits: ProberLimits { timeout_s, window_s }, count: Some(args.count) };
    let (prober, mut events) = EchoProber::spawn(&token, settings).context("failed to start probing")?;
    prober.set_peers(&[target]);
    // Where nothing can be sent nothing is lost either; such a run ends by time.
    let until = Instant::now() + Duration::from_secs_f64(2.0 * args.count as f64 * interval_s + timeout_s + 5.0);
    let mut seen = 0;
    while seen < args.count && !stop.load(Ordering::Relaxed) && Instant::now() < until {
        while let Ok(event) = events.try_recv() {
            seen += 1;
            match event.sample {
                Some(sample) if !args.common.json => println!("{target} seq={} {}", sample.seq, ms(sample.rtt_s)),
                None if !args.common.json => println!("{target} no answer"),
                _ => {}
            }
        }
        std::thread::sleep(LOOK);
    }
    let peers = prober.summaries();
    let peer = peers.first().context("the prober lost its peer")?;
    if args.common.json {
        print_json(&Report { target, summary: peer.summary })?;
    } else {
        print(target, &peer.summary);
    }
    match (&peer.send_error, peer.summary.answered) {
        (Some(error), _) => bail!("failed to send to {target}: {error}"),
        (None, 0) if stop.load(Ordering::Relaxed) => bail!("ended before {target} answered"),
        (None, 0) => bail!(
            "{target} did not answer: is an agent or `flexcomm probe serve` running there, with the same token, and \
             does a firewall let UDP port {} through?",
            args.port
        ),
        (None, _) => Ok(()),
    }
}

fn print(target: SocketAddr, s: &EchoSummary) {
    println!("--- echo {target}: {} sent, {} answered, {} lost", s.sent, s.answered, percent(s.loss));
    if let Some(rtt) = &s.rtt {
        println!("{}", describe(rtt));
    }
    let line = |way: &str, loss: Option<f64>, jitter: Option<f64>, queue: Option<f64>| {
        if let (Some(loss), Some(jitter), Some(queue)) = (loss, jitter, queue) {
            println!("{way}: loss {}, jitter {}, {} above its least (median)", percent(loss), ms(jitter), ms(queue));
        }
    };
    line("out ", s.loss_out, s.jitter_out_s, s.excess_out_s);
    line("back", s.loss_back, s.jitter_back_s, s.excess_back_s);
}
