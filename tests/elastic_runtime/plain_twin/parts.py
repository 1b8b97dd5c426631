"""The parts that scripts are composed of: habits around a training, and ends. Each is code for a place."""

from __future__ import annotations

START, BEFORE_INIT, BEFORE_PREPARE, BEFORE_LOOP = "start", "before init", "before prepare", "before loop"
LOOP, EVALUATION, LATER, AFTER_LOOP, END = "in epoch 0", "evaluation 0", "in epoch 1", "after loop", "end"
PLACES = (START, BEFORE_INIT, BEFORE_PREPARE, BEFORE_LOOP, LOOP, EVALUATION, LATER, AFTER_LOOP, END)

HABITS = {
    # hooks
    "excepthook replaced": """
def hook(kind, error, trace):
    print("hook:", kind.__name__, error)
sys.excepthook = hook
""",
    "excepthook chained": """
def chain(kind, error, trace, before=sys.excepthook):
    print("chained:", kind.__name__)
    before(kind, error, trace)
sys.excepthook = chain
""",
    "excepthook put back": """
kept_hook, sys.excepthook = sys.excepthook, lambda *_: print("for a while")
sys.excepthook = kept_hook
""",
    "threading hook": """
threading.excepthook = lambda given: print("thread:", given.exc_type.__name__)
broken = threading.Thread(target=lambda: 1 / 0)
broken.start(); broken.join()
""",
    "unraisable hook": """
sys.unraisablehook = lambda given: print("unraisable:", given.exc_type.__name__)
class Broken:
    def __del__(self): 1 / 0
Broken()
""",
    "displayhook": "sys.displayhook = lambda value: print('shown', value)",
    # signals
    "term handler": "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))",
    "term handler exits": """
def leave(number, frame):
    print("leaving"); sys.exit(7)
signal.signal(signal.SIGTERM, leave)
""",
    "term handler chained": """
def chained(number, frame, before=signal.getsignal(signal.SIGTERM)):
    print("chained term")
    if callable(before): before(number, frame)
signal.signal(signal.SIGTERM, chained)
""",
    "term handler put back": """
kept = signal.signal(signal.SIGTERM, lambda *_: print("for a while"))
signal.signal(signal.SIGTERM, kept)
""",
    "term ignored": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "term default": "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
    "term interrupts": "signal.signal(signal.SIGTERM, signal.default_int_handler)",
    "int handler": "signal.signal(signal.SIGINT, lambda *_: print('int', flush=True))",
    "int default": "signal.signal(signal.SIGINT, signal.SIG_DFL)",
    "usr1 handler": """
signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))
os.kill(os.getpid(), signal.SIGUSR1)
""",
    "alarm": """
rang = []
signal.signal(signal.SIGALRM, lambda *_: rang.append(print("alarm", flush=True)))
signal.setitimer(signal.ITIMER_REAL, 0.001)
signal.sigtimedwait([], 0.0)
while not rang: pass
""",
    "wakeup": """
wakeup = os.pipe(); os.set_blocking(wakeup[1], False)
signal.set_wakeup_fd(wakeup[1])
atexit.register(lambda: print("wakeup", signal.set_wakeup_fd(-1) == wakeup[1]))
""",
    "term sent and handled": """
passing = signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, passing)
""",
    # exits
    "atexit": "atexit.register(print, f'atexit {place}')",
    "atexit fails": "atexit.register(lambda: 1 / 0)",
    "atexit exits": "atexit.register(lambda: sys.exit(5))",
    "atexit unregistered": "atexit.register(print, 'never'); atexit.unregister(print)",
    "sys.exit noted": """
def noted(code=None, before=sys.exit):
    print("exit", code); before(code)
sys.exit = noted
""",
    "finally": """
def waiting():
    try: yield
    finally: print("finally", flush=True)
kept_waiting = waiting(); next(kept_waiting)
""",
    "file left open": "left_open = open('left', 'w'); left_open.write('all of it')",
    # logging and warnings
    "logging": "logging.basicConfig(level=logging.INFO); logging.info('of the script')",
    "logging debug": "logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format='%(name)s %(message)s')",
    "warnings captured": "logging.captureWarnings(True); warnings.warn('captured')",
    "warnings are errors": "warnings.simplefilter('error')",
    "warnings ignored": "warnings.filterwarnings('ignore', category=UserWarning)",
    "faulthandler": "import faulthandler; faulthandler.enable()",
    # streams
    "tee": """
class Tee:
    def __init__(self, stream): self.stream, self.copy = stream, open("tee", "w")
    def write(self, text): self.stream.write(text); self.copy.write(text)
    def flush(self): self.stream.flush(); self.copy.flush()
sys.stdout = Tee(sys.stdout)
""",
    "stdout to a file": "sys.stdout = open('moved', 'w')",
    "stderr none": "sys.stderr = None",
    "stderr closed": "sys.stderr = open(os.devnull, 'w'); sys.stderr.close()",
    "stdout redirected": """
import contextlib
redirected = contextlib.redirect_stdout(open("redirected", "w")); redirected.__enter__()
""",
    # threads and processes
    "daemon thread": "threading.Thread(target=threading.Event().wait, daemon=True, name='daemon').start()",
    "thread that ends later": """
def later():
    threading.main_thread().join(); print("later", flush=True)
threading.Thread(target=later, name="later").start()
""",
    "pool": """
import concurrent.futures
pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(print, "in the pool").result()
""",
    "fork that exits": """
sys.stdout.flush()
child = os.fork()
if child == 0: sys.exit(5)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "fork that fails": """
sys.stdout.flush()
child = os.fork()
if child == 0: raise LookupError("of the child")
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "fork that is terminated": """
sys.stdout.flush()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM); os._exit(3)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "process": """
import multiprocessing
def in_process(): print("process", flush=True); sys.exit(4)
child = multiprocessing.get_context("fork").Process(target=in_process)
child.start(); child.join(); print(child.exitcode)
""",
    "subprocess": """
import subprocess
print(subprocess.run(["/bin/sh", "-c", "kill -TERM $$"]).returncode)
""",
    # the process
    "chdir": "os.makedirs('below', exist_ok=True); os.chdir('below')",
    "environment": "os.environ['OF_THE_SCRIPT'] = 'yes'",
    "environment cleared": "os.environ.clear()",
    "umask": "os.umask(0o077)",
    "limit": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "recursion limit": "sys.setrecursionlimit(500)",
    "locale": "import locale; locale.setlocale(locale.LC_ALL, 'C.UTF-8')",
    "gc disabled": "gc.disable()",
    "gc frozen": "gc.freeze()",
    "gc threshold": "gc.set_threshold(100, 5, 5)",
    "switch interval": "sys.setswitchinterval(0.001)",
    "trace": "sys.setprofile(lambda *_: None)",
    # numbers
    "random state": "random.seed(3); print(random.random())",
    "random drawn": "print(random.random())",
    "numpy state": "import numpy; numpy.random.seed(4); print(numpy.random.rand())",
    "float64": "torch.set_default_dtype(torch.float64); torch.set_default_dtype(torch.float32)",
    "threads": "torch.set_num_threads(2)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "nondeterministic operation": """
try: torch.ones(4).put_(torch.tensor([1]), torch.ones(1))
except RuntimeError as error: print("refused", str(error)[:60])
""",
    "anomaly": "torch.autograd.set_detect_anomaly(True)",
    "matmul precision": "torch.set_float32_matmul_precision('high')",
    "printing": "torch.set_printoptions(precision=2)",
    # of a training
    "optimizer copied": "import copy; copied = copy.deepcopy(globals().get('optimizer')); print(type(copied).__name__)",
    "scheduler copied": "import copy; copied = copy.deepcopy(globals().get('scheduler')); print(type(copied).__name__)",
    "model pickled": """
import pickle
pickle.dumps(globals().get("model")); torch.save(globals().get("model"), "model.pt"); os.remove("model.pt")
""",
    "group of its own": """
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.destroy_process_group()
""",
    "another model": """
other = torch.nn.Linear(2, 1); other.bias = torch.nn.Parameter(torch.zeros(1)); other.inner = torch.nn.Linear(1, 1)
step = torch.optim.SGD(other.parameters(), lr=0.1)
other(torch.ones(1, 2)).sum().backward(); step.step(); step.zero_grad()
for _ in DataLoader(torch.ones(8, 2), batch_size=1): pass
""",
}
"""Things that a script does at one place, and goes on."""

ENDS = {
    "returns": "pass",
    "breaks": "stop = True",
    "sys.exit": "sys.exit()",
    "sys.exit(3)": "sys.exit(3)",
    "sys.exit(text)": "sys.exit('a text')",
    "SystemExit(4)": "raise SystemExit(4)",
    "SystemExit(text)": "raise SystemExit('another text')",
    "exit(6)": "import builtins; getattr(builtins, 'exit', sys.exit)(6)",
    "os._exit": "sys.stdout.flush(); os._exit(9)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "error": "raise ValueError('of the script')",
    "error in a thread": "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
    "exit in a thread": "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()",
    "error in atexit": "atexit.register(lambda: 1 / 0)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT)",
    "SIGINT twice": "try:\n    os.kill(os.getpid(), signal.SIGINT)\nfinally:\n    os.kill(os.getpid(), signal.SIGINT)",
    "SIGUSR2": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGUSR2)",
    "SIGHUP": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGHUP)",
    "caught, then sys.exit(1)": "failing = 1; raise LookupError('caught by the script')",
}
"""How a script may end, or a training, at one place."""

AFTER_A_FAILURE = """
try:
    train()
except BaseException as error:
    print("caught", type(error).__name__)
FAILING.clear(); stop = False
"""

MAINS = {
    "once": "train()",
    "twice": "train(); train()",
    "three folds": "for number in range(3): train()",
    "in a thread": "worker = threading.Thread(target=train); worker.start(); worker.join()",
    "guarded": """
try:
    train()
except Exception as error:
    print("caught", type(error).__name__); sys.exit(1)
""",
    "again after a failure": f"{AFTER_A_FAILURE}train()\n",
    "in a function with finally": """
def main():
    try:
        train()
    finally:
        print("cleaned up")
sys.exit(main())
""",
    "within another": "NESTED.append(1); train()",
    "plain after it": "train(); train(elastic=False)",
    "plain before it": "train(elastic=False); train()",
    "plain on the same model after a failure": f"{AFTER_A_FAILURE}train(elastic=False, given=model)\n",
}

GOES_ON = ("returns", "error in a thread", "exit in a thread", "error in atexit")
"""Those of the ends after which the script goes on."""

WITH_ONE = ("once", "guarded", "in a function with finally", "in a thread", "plain after it", "plain before it")
"""Those with one elastic training: a second one is refused on a worker, and with the same checkpoints."""

TEMPLATE = """
import atexit, gc, logging, os, random, resource, signal, sys, threading, time, warnings, weakref
import torch
from torch.utils.data import DataLoader, TensorDataset
from tests.elastic_runtime.plain_twin.left import begin
begin()
ACTIONS, FAILING, NESTED, stop, models = {actions!r}, {failing!r}, [], False, []
X = torch.arange(16.0).view(8, 2) / 16
def at(place):
    for name, code in ACTIONS.get(place, ()):
        exec(compile(code, f"<{{name}}>", "exec"), globals() | {{"place": place}} if "place" in code else globals())
    for name, code in FAILING.pop(place, ()):
        exec(compile(code, f"<{{name}}>", "exec"), globals())
def train(elastic={elastic}, given=None):
    global model, optimizer, scheduler
    torch.manual_seed(len(models))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)) if given is None else given
    models.append(weakref.ref(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=8)
    at("before init")
    if elastic:
        import elastic_runtime
        job = elastic_runtime.init({options})
        at("before prepare")
        model, optimizer, loader, scheduler = job.prepare(model, optimizer, loader, scheduler)
    else:
        at("before prepare")
    at("before loop")
    for epoch in job.epochs(3) if elastic else range(3):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            if elastic:
                job.backward(loss)
            else:
                loss.backward()
            at(f"in epoch {{epoch}}")
            optimizer.step()
            optimizer.zero_grad()
            if stop:
                break
        if stop:
            break
        scheduler.step()
        at(f"evaluation {{epoch}}")
        if NESTED:
            NESTED.clear()
            outer = model, optimizer, scheduler
            train()
            model, optimizer, scheduler = outer
    at("after loop")
    print("weights", [f"{{value:.3f}}" for value in torch.cat([p.detach().flatten() for p in model.parameters()])])
    model = optimizer = scheduler = None
at("start")
{main}
at("end")
print("last line")
"""
