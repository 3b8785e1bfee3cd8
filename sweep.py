import torch, sys, statistics as st, itertools, time, traceback
from affine_attn import *
from affine_attn.core import fused, epilogue
from affine_attn.core.engines import stock, sdpa
from affine_attn.core.accuracy import Shape, random_inputs, deviations
from affine_attn.core.call import checked_call
from affine_attn.measure import side_by_side
from benchmarks.cases import CUDA_SHAPES, plain_attention
from torch.nn.attention import SDPBackend
dev=torch.device('cuda')
print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
def graph_ms(fn, n=20, reps=5):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        fn(); fn()
    torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): fn()
    ts=[]
    for _ in range(reps):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b)/n)
    return st.median(ts)
x=torch.randn(256*2**20//2,device=dev).bfloat16(); y=torch.empty_like(x)
copy=graph_ms(lambda: y.copy_(x)); bw=x.numel()*4/copy/1e9
print('copy TB/s', bw)
def call_of(x,mask=Mask()): return checked_call(**({"sink":None,"alpha":None,"beta":None,"gate":None}|x),mask=mask,scale=None)
s0=CUDA_SHAPES['3B']
inp=random_inputs(variant('affine'),s0,torch.bfloat16,dev); c=call_of(inp)
o,z=stock.forward(c.q,c.k,c.v,c.scale,True,None)
print('cudnn o stride',o.stride(),'z',z.shape,z.stride(),z.dtype)
g=stock.backward(torch.randn_like(o),c.q,c.k,c.v,o,z,c.scale,True,None); print('grads stride',[t.stride() for t in g],[t.dtype for t in g])
qq=c.q.transpose(1,2).contiguous().transpose(1,2); o2,z2=stock.forward(qq,c.k,c.v,c.scale,True,None); print('BTHD q -> o stride',o2.stride())
# correctness first
for name in ('affine','affine_gated'):
    for shape in (Shape(1,3,1,333,333,128),):
        x=random_inputs(variant(name),shape,torch.bfloat16,dev)
        try:
            ds=deviations('sdpa',x); print(name,shape,'ok' if all(d.within for d in ds) else [d for d in ds if not d.within])
        except Exception as e: traceback.print_exc()
x=random_inputs(variant('affine'),Shape(2,6,2,320,320,64),torch.bfloat16,dev); x['alpha']-=0.5
print('negative alpha',[d for d in deviations('sdpa',x) if not d.within] or 'ok')
def floors(s):
    q=s.batch*s.heads*s.tq*s.head_dim*2; v=s.batch*s.kv_heads*s.tk*s.head_dim*2
    return (2*q+v)/bw/1e9, (2*q+3*v)/bw/1e9

CONF={'3B':((32,4),(64,4),(64,8)),'1B':((32,2),(64,4),(64,8)),'0.5B':((32,2),(64,4))}
warm=sys.argv[1:]==['warm']
for sh in ('3B','1B','0.5B'):
    s=CUDA_SHAPES[sh]; c=call_of(random_inputs(variant('affine'),s,torch.bfloat16,dev))
    o,z=stock.forward(c.q,c.k,c.v,c.scale,True,None); dy=torch.randn_like(o); dv=torch.randn_like(c.v)
    ff,fb=floors(s); print(sh,'floor fwd %.1f us bwd %.1f us'%(ff*1e3,fb*1e3))
    d=s.head_dim
    for T,w in CONF[sh]:
        fused._TILES[d]=(T,w)
        out=fused.finish(c,o,z); til=fused._tiling(c)
        pre=graph_ms(lambda: fused._value_prefix(c,til)); keepp=fused._value_prefix
        pp=keepp(c,til); fused._value_prefix=lambda *a: pp
        f=graph_ms(lambda: fused.finish(c,o,z)); fused._value_prefix=keepp
        r='%s T %d w %d prefix %.1f main %.1f us (%.0f%%)'%(sh,T,w,pre*1e3,f*1e3,100*ff/f)
        bb=[]
        for stg,ch in ((1,16),(2,16),(2,32)):
            fused._STAGES,fused._CHUNK=stg,ch
            bb.append((graph_ms(lambda: fused.gradients(c,dy,out,lambda *a:(o,dv,dv))),stg,ch))
        print(r,' bwd '+' '.join('%d/%d:%.0f'%(x[1],x[2],x[0]*1e3) for x in bb),'best %.0f%%'%(100*fb/min(bb)[0]),flush=True)
    fused._TILES[d]=CONF[sh][0]; fused._STAGES,fused._CHUNK=2,16
x=random_inputs(variant('affine'),CUDA_SHAPES['0.5B'],torch.bfloat16,dev)
lv={n:t.requires_grad_() if isinstance(t,torch.Tensor) else t for n,t in x.items()}; ws=[t for t in lv.values() if isinstance(t,torch.Tensor)]; dy=torch.randn_like(lv['q'])
fn=lambda: torch.autograd.grad(attention(**lv,impl='sdpa'),ws,dy)
for _ in range(10): fn()
torch.cuda.synchronize()
import cProfile,pstats,io
p=cProfile.Profile(); p.enable()
for _ in range(50): fn()
p.disable(); torch.cuda.synchronize(); st_=io.StringIO(); pstats.Stats(p,stream=st_).sort_stats('tottime').print_stats(28); print(st_.getvalue()[:5000])
