//! The client's way into a session.

use super::{Control, HANDSHAKE_S, LOOK_S, MeasureError, heed, mark_control, system};
use crate::auth::Key;
use crate::edge::fd::{Interest, wait};
use crate::edge::{monotonic, tcp};
use crate::throughput::{Frame, Purpose, client_proof, proves, server_proof};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;

/// Connects; the kernel's figure of the handshake is a round trip.
pub(super) fn connect(addr: SocketAddr, stop: &AtomicBool) -> Result<(Control<'_>, f64), MeasureError> {
    let socket = open_connection(addr, stop)?;
    let rtt_s = tcp::summary(&socket).map_or(0.0, |info| f64::from(info.min_rtt_us.min(info.rtt_us)) * 1e-6);
    Ok((Control::new(socket, Some(stop))?, rtt_s))
}

/// Waits for the connection in small steps, so that `stop` is heeded.
fn open_connection(addr: SocketAddr, stop: &AtomicBool) -> Result<TcpStream, MeasureError> {
    let failed = |cause: io::Error| MeasureError::Connect { addr, cause };
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP)).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    mark_control(&socket, addr.is_ipv6());
    match socket.connect(&addr.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(failed(error)),
        _ => {}
    }
    let until = monotonic().plus(HANDSHAKE_S);
    loop {
        heed(Some(stop))?;
        let look = monotonic().plus(LOOK_S).min(until);
        let ready = wait(&[Interest { fd: socket.as_fd(), write: true }], look).map_err(system("wait"))?;
        if ready[0] {
            return socket.take_error().and_then(|error| error.map_or(Ok(socket.into()), Err)).map_err(failed);
        }
        if monotonic() >= until {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
    }
}

/// The client's side of the handshake; returns the session.
pub(super) fn greet(control: &mut Control<'_>, key: &Key, purpose: &Purpose) -> Result<u64, MeasureError> {
    let Frame::Challenge(challenge) = control.answer(HANDSHAKE_S, "the server's challenge")? else {
        return Err(MeasureError::OutOfTurn("the server's challenge"));
    };
    let nonce: [u8; 32] = rand::random();
    let proof = client_proof(key, &challenge, &nonce, purpose);
    control.send(&Frame::Hello { nonce, purpose: *purpose, proof })?;
    let Frame::Accept { session, proof } = control.answer(HANDSHAKE_S, "the server's answer")? else {
        return Err(MeasureError::OutOfTurn("the server's answer"));
    };
    let proven = proves(&proof, &server_proof(key, &challenge, &nonce, session));
    if proven { Ok(session) } else { Err(MeasureError::Impostor) }
}

/// All streams at once: one after the other would cost round trips.
pub(super) fn open_streams(
    addr: SocketAddr,
    key: &Key,
    (session, count): (u64, u8),
    stop: &AtomicBool,
) -> Result<Vec<TcpStream>, MeasureError> {
    let open = || -> Result<TcpStream, MeasureError> {
        let (mut control, _) = connect(addr, stop)?;
        greet(&mut control, key, &Purpose::Stream { session })?;
        Ok(control.socket)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(open)).collect();
        let panicked = |_| system("open a stream")(io::Error::other("the thread panicked"));
        threads.into_iter().map(|thread| thread.join().map_err(panicked)?).collect()
    })
}
