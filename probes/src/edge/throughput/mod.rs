//! Throughput over TCP sockets: the client, and the loop that it shares with the server.

mod dial;
mod pending;
mod server;

pub use server::ThroughputServer;

use super::clock::Clocks;
use super::fd::{Interest, wait};
use super::udp::stamp_of;
use super::{SystemError, monotonic, system, tcp};
use crate::throughput::{
    BadFrame, DirectionResult, Frame, FrameReader, Plan, Purpose, Rate, Receiving, Refusal, Sending, TcpSummary,
    ThroughputResult,
};
use crate::{CONTROL_TOS, Nanos, Token};
use dial::{connect, greet, open_streams};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recvmsg, setsockopt, sockopt::ReceiveTimestampns};
use socket2::{SockRef, Socket};
use std::io::{self, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Longest wait for one frame of a handshake, seconds: three round trips of the worst link.
const HANDSHAKE_S: f64 = 4.0;
/// Unsent bytes that a stream may hold: little, so that *stop* stops.
const NOT_SENT: u32 = 64 << 10;
/// Bytes of one write.
const WRITE: usize = 32 << 10;
/// Bytes of one read.
const READ: usize = 256 << 10;
/// Longest waits before somebody looks at the clock again, seconds.
const LOOK_S: f64 = 0.05;

/// Why a measurement failed. The text completes "failed to measure the throughput".
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// No connection.
    #[error("connect to {addr}: {cause}")]
    Connect {
        /// The server.
        addr: SocketAddr,
        /// The system's reason.
        cause: io::Error,
    },
    /// The connection broke.
    #[error(transparent)]
    System(#[from] SystemError),
    /// The other side said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The other side speaks something else.
    #[error(transparent)]
    Frame(#[from] BadFrame),
    /// The other side said something out of turn.
    #[error("the other side answered out of turn while {0} was awaited")]
    OutOfTurn(&'static str),
    /// The server does not know the token itself.
    #[error("the server did not prove that it knows the token")]
    Impostor,
    /// The other side is silent.
    #[error("the other side was silent for {HANDSHAKE_S} s while {0} was awaited")]
    Silent(&'static str),
    /// The caller ended it before there was anything to tell.
    #[error("it was ended before the first byte")]
    Stopped,
    /// A phase gave nothing to estimate from.
    #[error("too few bytes arrived to tell a rate")]
    Nothing,
}

/// A connection that carries frames.
struct Control<'a> {
    socket: TcpStream,
    reader: FrameReader,
    /// Ends waiting when set.
    stop: Option<&'a AtomicBool>,
}

impl<'a> Control<'a> {
    fn new(socket: TcpStream, stop: Option<&'a AtomicBool>) -> Result<Self, MeasureError> {
        socket.set_nodelay(true).map_err(system("set up the connection"))?;
        socket.set_nonblocking(true).map_err(system("set up the connection"))?;
        Ok(Self { socket, reader: FrameReader::default(), stop })
    }

    /// Frames are far smaller than any socket buffer: a write that would block means a peer that does not read.
    fn send(&mut self, frame: &Frame) -> Result<(), MeasureError> {
        Ok(self.socket.write_all(&frame.encode()).map_err(system("send to the other side"))?)
    }

    /// A frame that is there now.
    fn try_next(&mut self) -> Result<Option<Frame>, MeasureError> {
        if let Some(frame) = self.reader.next_frame()? {
            return Ok(Some(frame));
        }
        let mut bytes = [0; 512];
        let room = self.reader.room().min(bytes.len());
        match self.socket.read(&mut bytes[..room]) {
            Ok(0) => Err(system("read from the other side")(io::ErrorKind::UnexpectedEof.into()).into()),
            Ok(n) => {
                self.reader.push(&bytes[..n]);
                Ok(self.reader.next_frame()?)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(system("read from the other side")(error).into()),
        }
    }

    /// The next frame, waited for until `seconds` have passed.
    fn next_within(&mut self, seconds: f64, awaited: &'static str) -> Result<Frame, MeasureError> {
        let until = monotonic().plus(seconds);
        loop {
            if let Some(frame) = self.try_next()? {
                return Ok(frame);
            }
            if monotonic() >= until {
                return Err(MeasureError::Silent(awaited));
            }
            heed(self.stop)?;
            let look = monotonic().plus(LOOK_S).min(until);
            wait(&[Interest { fd: self.socket.as_fd(), write: false }], look).map_err(system("wait"))?;
        }
    }

    /// The same, where a refusal is an error.
    fn answer(&mut self, seconds: f64, awaited: &'static str) -> Result<Frame, MeasureError> {
        match self.next_within(seconds, awaited)? {
            Frame::Refuse(refusal) => Err(refusal.into()),
            frame => Ok(frame),
        }
    }
}

fn heed(stop: Option<&AtomicBool>) -> Result<(), MeasureError> {
    if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) { Err(MeasureError::Stopped) } else { Ok(()) }
}

/// Sends until the phase is over or `stop` is set, then says how much.
fn send_phase(
    control: &mut Control<'_>,
    streams: &[TcpStream],
    mut phase: Sending,
    stop: &AtomicBool,
) -> Result<DirectionSent, MeasureError> {
    let data = vec![0x5a; WRITE];
    loop {
        if stop.load(Ordering::Relaxed) {
            phase.stop();
        }
        let now = monotonic();
        if phase.allowance(now) == 0 {
            break;
        }
        let mut interests = vec![Interest { fd: control.socket.as_fd(), write: false }];
        interests.extend(streams.iter().map(|stream| Interest { fd: stream.as_fd(), write: true }));
        let ready = wait(&interests, now.plus(LOOK_S).min(phase.deadline())).map_err(system("wait"))?;
        if ready[0] {
            match control.try_next()? {
                Some(Frame::Stop) => phase.stop(),
                Some(_) => return Err(MeasureError::OutOfTurn("the end of the phase")),
                None => {}
            }
        }
        for (mut stream, _) in streams.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            let take = (phase.allowance(monotonic()) as usize).min(WRITE);
            match stream.write(&data[..take]) {
                Ok(n) => phase.wrote(n as u64),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(system("send the test's bytes")(error).into()),
            }
        }
    }
    let tcp = tcp_of(streams);
    control.send(&Frame::Done { bytes: phase.sent(), tcp })?;
    Ok(DirectionSent { bytes: phase.sent(), tcp })
}

struct DirectionSent {
    bytes: u64,
    tcp: TcpSummary,
}

fn tcp_of(streams: &[TcpStream]) -> TcpSummary {
    streams.iter().filter_map(|stream| tcp::summary(stream).ok()).reduce(TcpSummary::join).unwrap_or_default()
}

/// Receives until the phase is over; returns the estimate and what the sender said.
fn receive_phase(
    control: &mut Control<'_>,
    streams: &[TcpStream],
    mut phase: Receiving,
    stop: &AtomicBool,
) -> Result<(Option<Rate>, DirectionSent), MeasureError> {
    let mut buffer = vec![0; READ];
    let mut sent = None;
    let mut stopped = false;
    loop {
        let now = monotonic();
        if sent.is_some() && phase.finished(now) {
            break;
        }
        if now >= phase.deadline() {
            return Err(MeasureError::Silent("the end of the phase"));
        }
        let mut interests = vec![Interest { fd: control.socket.as_fd(), write: false }];
        interests.extend(streams.iter().map(|stream| Interest { fd: stream.as_fd(), write: false }));
        let ready = wait(&interests, now.plus(LOOK_S)).map_err(system("wait"))?;
        let readable = streams.iter().zip(&ready[1..]).filter(|(_, ready)| **ready);
        let reads: Vec<_> = readable.map(|(stream, _)| read_stamped(stream, &mut buffer)).collect::<Result<_, _>>()?;
        phase.data(reads.into_iter().flatten());
        if ready[0] {
            match control.try_next()? {
                Some(Frame::Done { bytes, tcp }) => {
                    phase.done(bytes);
                    sent = Some(DirectionSent { bytes, tcp });
                }
                Some(_) => return Err(MeasureError::OutOfTurn("the end of the phase")),
                None => {}
            }
        }
        let enough = phase.wants_stop(monotonic()) || stop.load(Ordering::Relaxed);
        if sent.is_none() && enough && !stopped {
            stopped = true;
            control.send(&Frame::Stop)?;
        }
    }
    sent.map(|sent| (phase.rate(), sent)).ok_or(MeasureError::Silent("the end of the phase"))
}

/// Reads with the kernel's stamp of the newest segment; `None` when nothing is there.
fn read_stamped(stream: &TcpStream, buffer: &mut [u8]) -> Result<Option<(Nanos, u64)>, MeasureError> {
    let mut space = nix::cmsg_space!(nix::sys::time::TimeSpec);
    let mut iov = [IoSliceMut::new(buffer)];
    match recvmsg::<()>(stream.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_DONTWAIT) {
        Ok(message) if message.bytes == 0 => {
            Err(system("receive the test's bytes")(io::ErrorKind::UnexpectedEof.into()).into())
        }
        Ok(message) => {
            let stamp = message.cmsgs().ok().and_then(|mut all| all.find_map(stamp_of));
            Ok(Some((Clocks::read().place(stamp), message.bytes as u64)))
        }
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(error) => Err(system("receive the test's bytes")(error.into()).into()),
    }
}

/// Lets handshakes and words of control pass the queue that the job has built, where a shaper or switch heeds the
/// mark. Best effort: without it they only wait longer.
fn mark_control(socket: &Socket, v6: bool) {
    let _ = socket.set_tos_v4(u32::from(CONTROL_TOS));
    if v6 {
        let _ = socket.set_tclass_v6(u32::from(CONTROL_TOS));
    }
}

/// The bytes of a test queue as the job's own do: what passes the queue would not measure it.
fn unmark(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let _ = socket.set_tos_v4(0);
    let _ = socket.set_tclass_v6(0);
}

/// Prepares a stream on either side.
fn prepare(stream: &TcpStream, plan: &Plan) -> io::Result<()> {
    unmark(stream);
    stream.set_nonblocking(true)?;
    setsockopt(stream, ReceiveTimestampns, &true)?;
    SockRef::from(stream).set_tcp_notsent_lowat(NOT_SENT)?;
    if let Some(bps) = plan.pace_bps() {
        tcp::pace(stream, (bps / 8 / u64::from(plan.streams())).max(1))?;
    }
    Ok(())
}

/// Measures towards a server, in the calling thread and its network namespace; blocks for at most the plan's time
/// limits and some seconds. `Ok` holds at least one direction.
pub fn measure_throughput(addr: SocketAddr, token: &Token, plan: &Plan) -> Result<ThroughputResult, MeasureError> {
    measure_throughput_until(addr, token, plan, &AtomicBool::new(false))
}

/// The same, ended early with what was found so far when `stop` is set; a direction that had not begun is absent,
/// and before the first byte the error is `Stopped`.
pub fn measure_throughput_until(
    addr: SocketAddr,
    token: &Token,
    plan: &Plan,
    stop: &AtomicBool,
) -> Result<ThroughputResult, MeasureError> {
    let key = token.throughput_key();
    let (mut control, rtt_s) = connect(addr, stop)?;
    let purpose = Purpose::Control { plan: *plan, rtt_us: (rtt_s * 1e6).min(2e6) as u32 };
    let session = greet(&mut control, &key, &purpose)?;
    let streams = open_streams(addr, &key, (session, plan.streams()), stop)?;
    for stream in &streams {
        prepare(stream, plan).map_err(system("set up a stream"))?;
    }
    match control.answer(2.0 * HANDSHAKE_S, "the server's go-ahead")? {
        Frame::Ready => {}
        _ => return Err(MeasureError::OutOfTurn("the server's go-ahead")),
    }
    // From here on there is something to tell: a stop ends the phase, not the talk about it.
    control.stop = None;
    run_phases(&mut Client { control, streams, rtt_s }, plan, stop)
}

/// An open session as the client sees it.
struct Client<'a> {
    control: Control<'a>,
    streams: Vec<TcpStream>,
    rtt_s: f64,
}

fn run_phases(client: &mut Client<'_>, plan: &Plan, stop: &AtomicBool) -> Result<ThroughputResult, MeasureError> {
    let Client { control, streams, rtt_s } = client;
    let (out_bytes, back_bytes) = plan.shares();
    let mut result = ThroughputResult { out: None, back: None, streams: plan.streams() };
    if out_bytes > 0 {
        let phase = Sending::new(monotonic(), out_bytes, plan.time_limit_s());
        let sent = send_phase(control, streams, phase, stop)?;
        let rate = report(control, plan)?;
        result.out = Some(direction(rate, sent)?);
    }
    if back_bytes > 0 && !stop.load(Ordering::Relaxed) {
        control.send(&Frame::Go)?;
        let phase = Receiving::new(monotonic(), plan.time_limit_s(), *rtt_s);
        let (rate, sent) = receive_phase(control, streams, phase, stop)?;
        result.back = Some(direction(rate, sent)?);
    }
    Ok(result)
}

/// What the server found. It may have asked for a stop that crossed our last word.
fn report(control: &mut Control<'_>, plan: &Plan) -> Result<Option<Rate>, MeasureError> {
    loop {
        match control.answer(plan.time_limit_s() + 2.0 * HANDSHAKE_S, "the server's report")? {
            Frame::Report(rate) => return Ok(rate),
            Frame::Stop => {}
            _ => return Err(MeasureError::OutOfTurn("the server's report")),
        }
    }
}

fn direction(rate: Option<Rate>, sent: DirectionSent) -> Result<DirectionResult, MeasureError> {
    let rate = rate.ok_or(MeasureError::Nothing)?;
    Ok(DirectionResult { rate, sent_bytes: sent.bytes, tcp: sent.tcp })
}
